"""One line of the doctor's report, and how a check is kept from hanging or ending all others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch

Status = Literal["ok", "warning", "failure"]
WORST: tuple[Status, ...] = ("ok", "warning", "failure")


@dataclass(frozen=True)
class Check:
    """What was found. A failure is what training would fail on; a warning costs speed, or hurts other programs."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    rank: int | None = None  # None: of the whole job


def ok(name: str, detail: str) -> Check:
    return Check(name, "ok", detail)


def warning(name: str, detail: str, remedy: str) -> Check:
    return Check(name, "warning", detail, remedy)


def failure(name: str, detail: str, remedy: str) -> Check:
    return Check(name, "failure", detail, remedy)


def refused(name: str, error: HvdDDPError) -> Check:
    """What another part of the package refuses; the last sentence of its errors says how to mend it."""
    detail, _, remedy = str(error).rstrip().rpartition(". ")
    return failure(name, f"{detail}." if detail else remedy, remedy if detail else "")


@dataclass
class Patient:
    """What the checks of one rank look at, and what they leave for comparing ranks."""

    launch: Launch
    run_dir: Path
    data_dir: Path | None
    seconds: float  # that anything asked of another program or machine may take
    versions: dict[str, str] = field(default_factory=dict)  # must be the same on all ranks
    facts: dict[str, Any] = field(default_factory=dict)  # what JSON can carry; judged by `together`


Examination = Callable[[Patient], Iterable[Check]]


def examine(patient: Patient, examinations: dict[str, Examination]) -> list[Check]:
    """Run all at once, each in a thread that is left behind when it takes too long: file systems and resolvers hang."""
    found: dict[str, list[Check]] = {}

    def one(name: str, work: Examination) -> None:
        try:
            found[name] = list(work(patient))
        except Exception as error:  # of a broken machine anything may come; the other checks go on
            found[name] = [failure(name, f"the check itself ended with {type(error).__name__}: {error}", "Tell us.")]

    threads = {
        name: threading.Thread(target=one, args=(name, work), daemon=True) for name, work in examinations.items()
    }
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + 1.5 * patient.seconds
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if name not in found:
            what = "See what it waits for: a file system, a name server or a program that does not answer."
            found[name] = [failure(name, f"no answer in {1.5 * patient.seconds:g} s", what)]
    return [replace(check, rank=patient.launch.rank) for name in threads for check in found[name]]
