"""Where this rank is: what its heartbeat says, and where a failure happened."""

from __future__ import annotations

import contextlib
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
    """The place of this rank's main thread. Marking it costs some 100 ns and no message."""

    def __init__(self) -> None:
        self.moves = self.step = 0
        self.phase = "starting"
        self._long = 0

    def at(self, phase: str, step: int | None = None) -> None:
        """The main thread comes to this phase, having done so many optimizer steps."""
        self.phase = phase
        if step is not None:
            self.step = step
        self.moves += 1

    @contextlib.contextmanager
    def long_work(self, phase: str) -> Iterator[None]:
        """Work that may take as long as it likes: nobody counts as stuck while any rank is in it."""
        before, self.phase = self.phase, phase
        self._long += 1
        self.moves += 1
        try:
            yield
        finally:
            self._long -= 1
            self.moves += 1
        self.phase = before  # after an exception it stays: that is where it happened

    def place(self) -> Place:
        """Where the main thread is now; called by other threads."""
        return Place(self.moves, self.step, self.phase, self._long > 0)
