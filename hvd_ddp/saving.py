"""Checkpoints in the background: training goes on from a copy in memory, a thread brings it to the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ddp import checkpoint
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.snapshot import Snapshot


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is on the disk."""

    step: int
    path: Path
    seconds: float  # that it took to write
    stood: float  # seconds that training stood still for it


class Saver:
    """Writes the checkpoints of rank 0, one at a time.

    A save that is due while one is being written waits for it: to leave one out would cost more than an interval at the
    next kill, and to begin both would take the memory twice. So a disk that is too slow slows the training down. One
    that fails (OSError: full, over quota, read-only) does not: the next save tries again, and so does `finish`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        guard: Callable[[], None],
        saved: Callable[[Saved], None],
        failed: Callable[[int, OSError], None],
    ) -> None:
        """`guard` is asked before anything is written (HvdDDPError: the end); `saved`, `failed`: on the thread."""
        self._folder, self._keep, self._guard = folder, keep, guard
        self._saved, self._failed = saved, failed
        self._copies = Snapshot()
        self._thread = threading.Thread()
        self._good: Path | None = None  # the newest one that is known to be whole
        self._best: int | None = None  # step of the best one that is on the disk
        self._left: tuple[int, dict[str, Any], float] | None = None  # what is not on the disk yet
        self._error: BaseException | None = None

    def go_on(self, good: Path, best: dict[str, Any] | None) -> None:
        """`good` is the newest whole one so far, and says which is the best."""
        self._good, self._best = good, best["step"] if best else None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copy the state and begin to write it, after the one before. Raises what the thread raised."""
        began = time.monotonic()
        self._wait()
        copy = self._copies.take(state)
        self._left = step, copy, time.monotonic() - began
        self._thread = threading.Thread(target=self._write, args=(step,), name="saving", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the disk; HvdDDPError if the last state is not on it after another try."""
        self._wait()
        if self._left is not None and (error := self._try()) is not None:
            newest = f"the newest checkpoint is `{self._good.name}`" if self._good else "there is no checkpoint"
            raise HvdDDPError(
                f"Step {self._left[0]} can't be saved in `{self._folder}`: {error.strerror}. What was trained since "
                f"the last save is lost; {newest}. Make room there (a smaller --keep does, too), or mend what else it "
                "is, and give the same command again: it goes on."
            )

    def settle(self, seconds: float) -> None:
        """Give the one that is being written so long: the job ends here."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _wait(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _write(self, step: int) -> None:
        """On the thread."""
        try:
            if (error := self._try()) is not None:
                self._failed(step, error)
        except BaseException as other:  # for the main thread
            self._error = other

    def _try(self) -> OSError | None:
        """Bring what is left to the disk; what hinders it."""
        assert self._left is not None
        (step, state, stood), began = self._left, time.monotonic()
        best = (state.get("decisions", {}).get("best") or {}).get("step")
        wanted = [one for one in (best, self._best) if one is not None]
        try:
            self._guard()
            if self._good is not None:  # a start with a smaller --keep, perhaps for a full disk
                checkpoint.prune(self._good, keep=self._keep, best=wanted)
            wanted = [step] if step == best else wanted  # once it is there
            path = checkpoint.save(self._folder, step, state, keep=self._keep, best=wanted, guard=self._guard)
        except OSError as error:
            return error
        self._left, self._good = None, path
        self._best = step if step == best else self._best
        self._saved(Saved(step, path, time.monotonic() - began, stood))
        return None
