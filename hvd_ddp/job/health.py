"""Who failed first: the job ends with that rank's error and exit code, and only that one is printed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hvd_ddp.errors import FAILED, INTERRUPTED, HvdDDPError
from hvd_ddp.job.network import store_client
from hvd_ddp.job.rendezvous import Meeting

if TYPE_CHECKING:
    from torch.distributed import Store

LOOK = 0.5  # seconds between two looks at the store
GRACE = 5.0  # seconds that ranks wait for each other to learn of the first failure
GONE = 10.0  # seconds without the store's host, in a process that has not come to its end


@contextlib.contextmanager
def ends_together(meeting: Meeting) -> Iterator[None]:
    """Let an exception of any rank end all processes at once, hard: no clean-up may wait for ranks that are dead.

    The first failing rank puts its record into the store and prints it. A thread of the others looks for it, so that a
    rank that waits in a collective or in user code ends too; what they raise after it (a connection closed by the
    peer) is no news and is not printed.
    """
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(meeting, done), name="health", daemon=True)
    if meeting.launch.world_size > 1:
        watcher.start()
    try:
        yield
        done.set()
        if meeting.launch.world_size > 1:
            watcher.join(GRACE)
            _wait_for_all(meeting, meeting.store, "end/count", GONE)
    except SystemExit:
        raise
    except BaseException as error:
        done.set()
        record = _record(meeting, error)
        first = _first(meeting, record)
        if first is None or first["rank"] == record["rank"]:
            _print(record, several=meeting.launch.world_size > 1)
        _leave(meeting, meeting.store, int((first or record)["exit_code"]))
    finally:
        done.set()


def _watch(meeting: Meeting, done: threading.Event) -> None:
    """End this process when another rank has failed. Its client is its own: a call that waits holds up all others."""
    try:
        store = store_client(*meeting.store_address)
        while not done.wait(LOOK):
            if store.check(["failure/first"]):
                first = json.loads(store.get("failure/first"))
                if first["rank"] != meeting.launch.rank and not done.is_set():
                    _leave(meeting, store, int(first["exit_code"]))
                return
    except RuntimeError as error:  # the process that hosts the store has gone: at the end of the job, or too early
        if not done.wait(GONE):
            host = (meeting.launch.hosts or ("its host",))[0]
            sys.stderr.write(f"hvd_ddp: rank 0 on {host} is gone, rank {meeting.launch.rank} leaves ({error})\n")
            _say_farewell(meeting)
            os._exit(FAILED)


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
        "exception": _words(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def _words(error: BaseException) -> str:
    if isinstance(error, HvdDDPError):
        return str(error)
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"


def _first(meeting: Meeting, record: dict[str, Any]) -> dict[str, Any] | None:
    """The record of the first failure, ours if nobody was before us; None if the store has gone."""
    try:
        value = meeting.store.compare_set("failure/first", "", json.dumps(record))
        first: dict[str, Any] = json.loads(value)
        return first
    except (RuntimeError, ValueError):
        return None


def _print(record: dict[str, Any], *, several: bool) -> None:
    where = f"rank {record['rank']} on {record['host']} failed: " if several and record["exit_code"] == FAILED else ""
    if not record["known"]:
        sys.stderr.write(record["traceback"])
    sys.stderr.write(f"hvd_ddp: {where}{record['exception']}\n")


def _leave(meeting: Meeting, store: Store, code: int) -> None:
    """Leave when all know of it: mpirun kills the others 0.5 s after the first has left."""
    _say_farewell(meeting)
    _wait_for_all(meeting, store, "failure/count", GRACE)
    os._exit(code)


def _wait_for_all(meeting: Meeting, store: Store, key: str, seconds: float) -> None:
    """Wait until every rank is here, at most so long. Rank 0 leaves last: the store goes with it."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(RuntimeError):
        store.add(key, 1)
        while time.monotonic() < deadline and store.add(key, 0) < meeting.launch.world_size:
            time.sleep(0.05)
        if meeting.launch.rank == 0:
            time.sleep(0.3)


def _say_farewell(meeting: Meeting) -> None:
    for farewell in meeting.farewells:
        with contextlib.suppress(Exception):  # the first failure counts
            farewell()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
