"""Where this rank is: what its heartbeat says, and where a failure happened."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

# A rank in one of these may be waiting for others: it is stuck only when nobody moves.
WAITING = frozenset({"backward", "averaging gradients", "logging", "meeting the others"})


@dataclass(frozen=True)
class Place:
    """Where a rank was at some moment. A heartbeat alone proves nothing: `moves` must grow."""

    moves: int = 0
    step: int = 0  # optimizer steps done
    phase: str = "starting"
    long: bool = False  # in work without a bound

    @property
    def waiting(self) -> bool:
        """Whether it may be the others that keep it."""
        return self.phase in WAITING

    def __str__(self) -> str:
        return f"{self.phase} at step {self.step}"


class Pulse:
    """The place of this rank's main thread, and the time that it spends in each. Marking it costs no message."""

    def __init__(self) -> None:
        self.moves = self.step = 0
        self.phase = "starting"
        self._long = 0
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def at(self, phase: str, step: int | None = None) -> None:
        """The main thread comes to this phase, having done so many optimizer steps."""
        self._come_to(phase)
        if step is not None:
            self.step = step
        self.moves += 1

    @contextlib.contextmanager
    def long_work(self, phase: str) -> Iterator[None]:
        """Work that may take as long as it likes: nobody counts as stuck while any rank is in it."""
        before = self.phase
        self._come_to(phase)
        self._long += 1
        self.moves += 1
        try:
            yield
        finally:
            self._long -= 1
            self.moves += 1
        self._come_to(before)  # after an exception it stays: that is where it happened

    def place(self) -> Place:
        """Where the main thread is now; called by other threads."""
        return Place(self.moves, self.step, self.phase, self._long > 0)

    def lap(self) -> dict[str, float]:
        """Seconds that the main thread has spent in each phase since it last asked."""
        self._come_to(self.phase)
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _come_to(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now
