"""Where the numbers of a run also go: TensorBoard, MLflow, Weights & Biases. A new one is a file here and a line.

Each works on a thread of its own: training waits for none and ends for none, whatever a disk or a server does.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from queue import Full, Queue
from typing import Any, Protocol

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import export

# The module of each, which has its `Tracker`, and what pip installs for it.
TRACKERS = {
    "tensorboard": ("hvd_ddp.trackers.tensorboard", "tensorboard"),
    "mlflow": ("hvd_ddp.trackers.mlflow", "mlflow-skinny"),
    "wandb": ("hvd_ddp.trackers.wandb", "wandb"),
}
# Unless the user has set them: nothing is told to those who make the trackers, and MLflow may write plain files, which
# bear file systems that SQLite does not.
SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
MOST_WAITING = 10_000  # lines that memory keeps for a slow server
TO_CLOSE = 10.0  # seconds that the end of a run gives to a slow server
LONGEST = 300  # characters that a warning quotes


@dataclass(frozen=True)
class About:
    """The start of a run, as a tracker is told of it."""

    directory: Path
    restart: int
    step: int  # what was told of later steps no longer counts
    config: dict[str, Any]  # plain values: the options, and what was chosen for `auto`


class Tracker(Protocol):
    """What rank 0 tells, on one thread. Made with `About`; raises whatever its library raises."""

    def row(self, kind: str, step: int, values: dict[str, float]) -> None:
        """Numbers of a line of metrics.jsonl of that kind, "train" or "eval"."""

    def close(self, status: str) -> None:
        """The run has ended: "finished", "preempted" or "failed"."""


class Trackers:
    """All that --track names; on ranks that tell nothing, none."""

    def __init__(self, names: Sequence[str] = (), *, warn: Callable[[str], None] = lambda text: None) -> None:
        """Raises HvdDDPError where the package of one is missing."""
        export(SETTINGS if names else {}, over_the_users=False)
        self._makers = {name: _import(name) for name in dict.fromkeys(names)}
        self._warn, self._told = warn, list[_Told]()

    def open(self, about: About) -> None:
        """Begin."""
        self._told = [_Told(name, make, about, self._warn) for name, make in self._makers.items()]

    def row(self, kind: str, step: int, row: dict[str, Any]) -> None:
        """Tell the numbers of a line of metrics."""
        values = dict(_numbers(row))
        for told in self._told:
            told.tell((kind, step, values))

    def close(self, status: str, within: float = TO_CLOSE) -> None:
        """Tell the end, and wait so many seconds until all has arrived; a second time does nothing."""
        deadline = time.monotonic() + within
        for told in self._told:
            told.tell(status)
        for told in self._told:
            told.join(deadline - time.monotonic())
        self._told = []


class _Told:
    """A tracker and its thread. It is given up, with one warning, when it raises or does not keep up."""

    def __init__(self, name: str, make: Callable[[About], Tracker], about: About, warn: Callable[[str], None]) -> None:
        self._name, self._warn = name, warn
        self._waiting: Queue[tuple[str, int, dict[str, float]] | str] = Queue(MOST_WAITING)
        self._given_up = False
        self._thread = threading.Thread(target=self._work, args=(make, about), name=f"--track {name}", daemon=True)
        self._thread.start()

    def tell(self, what: tuple[str, int, dict[str, float]] | str) -> None:
        """A line; or, as its last word, how the run has ended."""
        if not self._given_up:
            try:
                self._waiting.put_nowait(what)
            except Full:
                self._give_up(f"{MOST_WAITING} lines wait for it")

    def join(self, within: float) -> None:
        self._thread.join(max(within, 0.0))
        if self._thread.is_alive() and not self._given_up:
            self._give_up(f"{self._waiting.qsize()} lines still wait for it")

    def _work(self, make: Callable[[About], Tracker], about: About) -> None:
        try:
            tracker = make(about)
            while not isinstance(what := self._waiting.get(), str):
                tracker.row(*what)
            tracker.close(what)
        except (Exception, SystemExit) as error:
            self._give_up(_said(error))

    def _give_up(self, why: str) -> None:
        self._given_up = True
        self._warn(f"--track {self._name} ends here: {why}")


def _import(name: str) -> Callable[[About], Tracker]:
    if name not in TRACKERS:
        raise HvdDDPError(f"--track has `{name}`, which is none of the trackers: {', '.join(TRACKERS)}.")
    module, package = TRACKERS[name]
    try:
        make: Callable[[About], Tracker] = import_module(module).Tracker
    except ImportError as error:
        raise HvdDDPError(
            f"--track is `{name}`, and its package can't be imported ({_said(error)}): nothing was started. Install it "
            f"with `pip install {package}`, or leave --track {name} out."
        ) from error
    return make


def _said(error: BaseException) -> str:
    """In one line, and without the password that an address may have."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"//[^/\s@]*@", "//", text)[:LONGEST]


def _numbers(row: dict[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line by their names: those of a table in it as table/name."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{before}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{before}{name}", float(value)
