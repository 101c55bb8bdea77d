"""What is known of a failure, and how it is told."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from typing import Any

from hvd_ddp.errors import FAILED, INTERRUPTED, HvdDDPError
from hvd_ddp.job.launch import Launch
from hvd_ddp.job.pulse import Place

LONGEST_TRACEBACK = 1 << 16  # characters

Record = dict[str, Any]  # rank, host, phase, step, exception, traceback, time, exit_code; what failures/ holds

GONE = "its process is gone without a word: killed (perhaps for memory), or its node went down"


def record(launch: Launch, rank: int, place: Place, exception: str, **more: Any) -> Record:
    """A failure of `rank` at `place`."""
    return {
        "rank": rank,
        "host": (launch.hosts or ("this host",))[rank],
        "phase": place.phase,
        "step": place.step,
        "exception": exception,
        "traceback": "",
        "time": time.time(),
        "exit_code": FAILED,
    } | more


def record_of(launch: Launch, place: Place, error: BaseException, **more: Any) -> Record:
    """An exception of this rank. What the user can mend, or has done, needs no traceback."""
    if isinstance(error, HvdDDPError):
        return record(launch, launch.rank, place, str(error), exit_code=error.exit_code, **more)
    if isinstance(error, KeyboardInterrupt):
        return interrupted(launch, place)
    trace = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
    return record(launch, launch.rank, place, f"{type(error).__name__}: {error}", traceback=trace, **more)


def interrupted(launch: Launch, place: Place) -> Record:
    """Somebody does not want to wait for the checkpoint."""
    return record(launch, launch.rank, place, "interrupted", exit_code=INTERRUPTED)


def check_report(report: Any, rank: int) -> Record:
    """What a rank tells of its own failure; ValueError for anything else."""
    kinds = {"rank": int, "host": str, "phase": str, "step": int, "exception": str, "traceback": str, "time": float,
             "exit_code": int}  # fmt: skip
    if not isinstance(report, dict) or any(type(report.get(name)) is not kind for name, kind in kinds.items()):
        raise ValueError("no failure")
    if report["rank"] != rank or not 0 <= report["exit_code"] < 256:
        raise ValueError("not of this rank")
    return {name: report[name] for name in kinds} | {"consequence": bool(report.get("consequence"))}


def check_verdict(verdict: Any, world_size: int) -> Record:
    """What rank 0 tells of the failure that ends the job; ValueError for anything else."""
    numbers = [(verdict.get("rank"), world_size), (verdict.get("exit_code"), 256)] if isinstance(verdict, dict) else []
    if not numbers or not all(type(value) is int and 0 <= value < most for value, most in numbers):
        raise ValueError("no verdict")
    return {"still": False, "kill": False, **verdict}


def say(known: Record, *, several: bool) -> None:
    """Print one failure, as the last thing that the job says."""
    where = ""
    if several and known["exit_code"] == FAILED:
        how = known.get("seen", "failed in")
        where = f"rank {known['rank']} on {known['host']} {how} {known['phase']} at step {known['step']}: "
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"{known['traceback']}hvd_ddp: {where}{known['exception']}\n")
        sys.stderr.flush()


def silent(seconds: float) -> str:
    """Of a rank whose heartbeat stays away."""
    return f"it has been silent for {seconds:.0f} s: stopped, hanging in the kernel, or cut off"


def names(ranks: list[int]) -> str:
    """Some ranks, for a person."""
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
