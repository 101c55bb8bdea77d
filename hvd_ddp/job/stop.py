"""When do we stop: signals and the end of the allocation become an order, and all ranks stop after the same step.

No collective in a step asks. An order goes from rank 0 to every rank's line (job/line.py); from then on that rank's
main thread waits between two steps, and its line answers with the last step after which it went on. When rank 0 has
all answers, the first step after which every rank can stop is one more than the largest of them.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hvd_ddp.errors import INTERRUPTED, STOPPED_EARLY, HvdDDPError
from hvd_ddp.job.line import Line, told, told_number

REPEATED = 5.0  # seconds in which a second TERM is the scheduler's repetition (a time limit sends two, 10 ms apart)
BOUNCE = 0.3  # seconds in which a second INT is the launcher's copy of the terminal's
ASK_AGAIN = 60.0  # seconds after which the end of the allocation is asked for again: the user may move it


@dataclass(frozen=True)
class Order:
    """Why the job stops, and the code that it then exits with."""

    why: str
    exit_code: int = STOPPED_EARLY


class Signals:
    """Signals that do not end this process any more, readable from another thread by `descriptor`.

    Python's own handlers run when the main thread comes back from C++, which may be never; the number of a signal is
    written into a socket at once. To be made on the main thread.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._caught: set[int] = set()

    @property
    def descriptor(self) -> int:
        """Readable when a signal has come."""
        return self._reader.fileno()

    def catch(self, *numbers: int) -> None:
        """From now on."""
        self._caught.update(numbers)
        for number in numbers:
            signal.signal(number, lambda *_: None)

    def ignore(self) -> None:
        """When all is done: on its way out Python puts the default handlers back, which would end it with a failure."""
        for number in self._caught:
            signal.signal(number, signal.SIG_IGN)

    def read(self) -> list[int]:
        """Numbers of the signals that have come since."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in self._reader.recv(4096) if number in self._caught]
        return []


class Stop:
    """This rank's side of the agreement. Without a line (no `ends_together` around it) it never stops."""

    def __init__(self) -> None:
        self.signals: Signals | None = None
        self.warning: int | None = None  # the number of the signal that the scheduler warns with
        self.order: Order | None = None
        self.request: Callable[[Order], None] = lambda order: None  # any rank, any thread; the line carries it
        self._passed = -1  # the last step after which the main thread went on
        self._at = 0
        self._lock, self._decided = threading.Lock(), threading.Event()
        self._came: dict[int, float] = {}

    @property
    def pending(self) -> bool:
        """Whether this rank knows of an order: long loops without steps (evaluation) cut short."""
        return self.order is not None

    def after(self, step: int, *, known: bool = False) -> bool:
        """Whether all ranks stop after this step; called by the main thread between two steps.

        `known`: this rank has learnt from a reduced value that there is an order, perhaps before its line has.
        """
        with self._lock:
            if self.order is None and not known:
                self._passed = step
                return False
        self._decided.wait()
        return step >= self._at

    def ordered(self, order: Order) -> int:
        """The order has come (on the line's thread): the last step after which this rank went on."""
        with self._lock:
            self.order = order
            return self._passed

    def decided(self, step: int) -> None:
        """All ranks stop after this step (on the line's thread)."""
        self._at = step
        self._decided.set()

    def signalled(self, number: int) -> Order | Literal["leave"] | None:
        """What a signal means now: an order, to leave at once, or nothing new."""
        now, before = time.monotonic(), self._came.get(number)
        self._came[number] = now
        name = signal.Signals(number).name
        if number == self.warning:
            return Order(f"signal {name}")
        if before is None:
            return Order(f"signal {name}", INTERRUPTED if number == signal.SIGINT else STOPPED_EARLY)
        if number == signal.SIGINT:
            return "leave" if now - before > BOUNCE else None
        return "leave" if now - before > REPEATED and not self._decided.is_set() else None

    def instead_of_dying(self) -> None:
        """From now on there is something to save: Ctrl-C and TERM are orders to stop.

        Until the process ends: the TERM of a launcher that has seen another rank end must not cut its last words off.
        """
        if self.signals is not None:
            self.signals.catch(signal.SIGINT, signal.SIGTERM)

    def before_the_end(self, minutes: float, ends_at: float, ask: Callable[[float], float]) -> None:
        """Order a stop so many minutes before `ends_at`, in seconds since the epoch.

        Asked for again now and then by `ask` (the last answer) -> the end; HvdDDPError there counts as no news.
        """

        def watch(ends_at: float = ends_at) -> None:
            while True:
                with contextlib.suppress(HvdDDPError):
                    ends_at = ask(ends_at)
                left = ends_at - 60 * minutes - time.time()
                if left <= 0:
                    self.request(Order(f"the allocation ends at {time.strftime('%H:%M:%S', time.localtime(ends_at))}"))
                    return
                time.sleep(min(left, ASK_AGAIN))

        threading.Thread(target=watch, name="stop-before", daemon=True).start()


class Agreement:
    """Rank 0's side: one order, and the step after which every rank can still stop."""

    def __init__(self, line: Line, world_size: int) -> None:
        self._line, self._world_size = line, world_size
        self._ordered = False
        self._passed: dict[int, int] = {}
        line.on |= {"please stop": lambda _, order: self._order(order), "aware": self._count}

    def _order(self, order: dict[str, Any]) -> None:
        order = asdict(told(Order, order))
        if not self._ordered:
            self._ordered = True
            self._line.tell_all("stop", order)

    def _count(self, rank: int, passed: int) -> None:
        self._passed[rank] = told_number(passed)
        if len(self._passed) == self._world_size:
            self._line.tell_all("stop after", max(self._passed.values()) + 1)
