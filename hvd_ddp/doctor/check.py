"""One line of the doctor's report, and how a check is kept from hanging or ending all others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch

T = TypeVar("T")
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
    return failure(name, detail or remedy, remedy if detail else "")


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


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns, done in a thread that is left behind when it takes longer: TimeoutError then.

    File systems and resolvers hang in the kernel, where no signal ends them.
    """
    done: list[tuple[T | None, BaseException | None]] = []

    def attempt() -> None:
        try:
            done.append((work(), None))
        except BaseException as error:
            done.append((None, error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        raise TimeoutError(f"no answer in {seconds:g} s")
    result, error = done[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def bounded(name: str, seconds: float, work: Callable[[], Iterable[Check]]) -> list[Check]:
    """The checks, or a failure of this name that says why there are none: the others go on."""
    try:
        return within(seconds, lambda: list(work()))
    except TimeoutError as error:
        remedy = "See what it waits for: a file system, a name server or a program that does not answer."
        return [failure(name, str(error), remedy)]
    except Exception as error:  # of a broken machine anything may come
        return [failure(name, f"the check itself ended with {type(error).__name__}: {error}", "Report it, please.")]


def examine(patient: Patient, examinations: dict[str, Examination]) -> list[Check]:
    """Run all at once."""
    limit = 1.5 * patient.seconds

    def one(name: str) -> list[Check]:
        return bounded(name, limit, lambda: examinations[name](patient))

    with ThreadPoolExecutor(len(examinations)) as pool:  # whose threads end in time: they only wait
        found = list(pool.map(one, examinations))
    return [replace(check, rank=patient.launch.rank) for checks in found for check in checks]
