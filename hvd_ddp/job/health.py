"""Who failed first: the job ends with that rank's error and exit code, and only that one is printed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from hvd_ddp.errors import FAILED, INTERRUPTED, HvdDDPError
from hvd_ddp.job.rendezvous import Meeting

GRACE = 3.0  # seconds that the rank which hosts the store lets others read the first failure


@contextlib.contextmanager
def ends_together(meeting: Meeting) -> Iterator[None]:
    """Let an exception of any rank end the process at once, hard: peers may be dead, and no clean-up may wait for them.

    The first failing rank puts its record into the store; it alone prints. What others raise after it (a connection
    closed by the peer) is no news.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        record = _record(meeting, error)
        first = _first(meeting, record)
        mine = first is None or first["rank"] == record["rank"]
        sys.stdout.flush()
        if mine:
            _print(record, several=meeting.launch.world_size > 1)
        _leave(meeting, int((first or record)["exit_code"]))


def _record(meeting: Meeting, error: BaseException) -> dict[str, Any]:
    rank = meeting.launch.rank
    code = FAILED
    if isinstance(error, HvdDDPError):
        code = error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        code = INTERRUPTED
    return {
        "rank": rank,
        "host": (meeting.launch.hosts or ("this host",))[rank],
        "exit_code": code,
        "known": isinstance(error, HvdDDPError | KeyboardInterrupt),
        "exception": str(error) if isinstance(error, HvdDDPError) else f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.time(),
    }


def _first(meeting: Meeting, record: dict[str, Any]) -> dict[str, Any] | None:
    """The record of the first failure, ours if nobody was before us; None if the store has gone."""
    try:
        value = meeting.store.compare_set("failure/first", "", json.dumps(record))
        meeting.store.add("failure/count", 1)
        first: dict[str, Any] = json.loads(value)
        return first
    except (RuntimeError, ValueError):
        return None


def _print(record: dict[str, Any], *, several: bool) -> None:
    where = f"rank {record['rank']} on {record['host']} failed: " if several and record["exit_code"] == FAILED else ""
    if not record["known"]:
        sys.stderr.write(record["traceback"])
    sys.stderr.write(f"hvd_ddp: {where}{record['exception']}\n")
    sys.stderr.flush()


def _leave(meeting: Meeting, code: int) -> None:
    if meeting.launch.rank == 0:  # the store goes with this process
        deadline = time.monotonic() + GRACE
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline and meeting.store.add("failure/count", 0) < meeting.launch.world_size:
                time.sleep(0.05)
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
