"""When do we stop: signals, the end of the allocation, and the step that all ranks agree on."""

import hashlib
import math
import os
import queue
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
from launchers import environment

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job import stop as module
from hvd_ddp.job.stop import BOUNCE, REPEATED, Agreement, Order, Signals, Stop

TERM, INT, USR1, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2

# Signals


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in (TERM, INT, USR1, USR2)}
    yield Signals()
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def test_a_signal_that_is_caught_can_be_read(signals: Signals) -> None:
    signals.catch(USR2, TERM)
    assert signals.read() == []
    send(USR2, TERM, USR2)
    assert select.select([signals.descriptor], [], [], 5.0)[0], "it is readable"
    assert sorted(signals.read()) == sorted([USR2, TERM, USR2])
    assert signals.read() == []


def test_others_are_left_alone(signals: Signals) -> None:
    came = []
    signal.signal(USR1, lambda *_: came.append(USR1))
    signals.catch(USR2)
    send(USR1)
    assert (signals.read(), came) == ([], [USR1])


def test_a_finished_run_is_not_ended_by_a_late_warning() -> None:
    """Python puts the default handlers back while it ends, which takes a while with torch loaded."""
    program = (
        "import atexit, os, signal\nfrom hvd_ddp.job.stop import Signals\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, me=os.getpid(), number=int(signal.SIGUSR2)): kill(me, number)\n"
        "signals = Signals()\nsignals.catch(signal.SIGUSR2, signal.SIGTERM)\n"
        "import sys; sys.late = Late()\n{}\n"
    )
    for last, wanted in (("", -signal.SIGUSR2), ("signals.ignore()", 0)):
        command = [sys.executable, "-c", program.format(last)]
        assert subprocess.run(command, env=environment(), timeout=60).returncode == wanted


def test_it_is_read_while_the_main_thread_is_in_a_library(signals: Signals) -> None:
    """Python's own handlers wait until it comes back: in a hanging collective, never."""
    signals.catch(USR2)
    readable: list[float] = []

    def read() -> None:
        time.sleep(0.1)
        send(USR2)
        select.select([signals.descriptor], [], [], 30.0)
        readable.append(time.monotonic())

    thread = threading.Thread(target=read)
    thread.start()
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 3_000_000)  # a second or more, without coming back in between
    ended = time.monotonic()
    thread.join()
    assert signals.read() == [USR2]
    assert readable[0] < ended


def test_ctrl_c_and_term_are_orders_when_there_is_something_to_save(signals: Signals) -> None:
    stop = Stop()
    stop.signals = signals
    stop.instead_of_dying()
    assert callable(signal.getsignal(TERM)), "else the next line ends the tests"
    send(TERM, INT)
    assert sorted(signals.read()) == sorted([TERM, INT])


def test_without_signals_nothing_is_caught() -> None:
    """In a program of the user's own, which may have handlers of its own."""
    before = signal.getsignal(TERM)
    Stop().instead_of_dying()
    assert signal.getsignal(TERM) == before


# What they mean


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, int], Any]:
    """What a signal at that time (seconds) means."""
    stop, now = Stop(), [0.0]
    stop.warning = USR2
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def ask(seconds: float, number: int) -> Any:
        if number == 0:
            return stop.decided(7)
        now[0] = 1000.0 + seconds
        return stop.signalled(number)

    return ask


def test_term_stops_and_its_repetition_is_nothing_new(at: Callable[[float, int], Any]) -> None:
    """The time limit of Slurm sends two, 10 ms apart."""
    assert at(0.0, TERM) == Order("signal SIGTERM", 75)
    assert at(0.01, TERM) is None
    assert at(REPEATED - 0.1, TERM) is None


def test_a_later_term_leaves(at: Callable[[float, int], Any]) -> None:
    at(0.0, TERM)
    assert at(REPEATED + 0.1, TERM) == "leave"


def test_a_later_term_is_nothing_new_once_a_stop_is_agreed(at: Callable[[float, int], Any]) -> None:
    at(0.0, TERM)
    at(0.0, 0)
    assert at(REPEATED + 0.1, TERM) is None


def test_ctrl_c_saves_and_a_second_one_leaves(at: Callable[[float, int], Any]) -> None:
    assert at(0.0, INT) == Order("signal SIGINT", 130)
    assert at(BOUNCE - 0.1, INT) is None, "the launcher's copy of the terminal's"
    assert at(BOUNCE + 0.5, INT) == "leave"


def test_a_second_ctrl_c_leaves_also_once_a_stop_is_agreed(at: Callable[[float, int], Any]) -> None:
    """The checkpoint may be what hangs."""
    at(0.0, INT)
    at(0.0, 0)
    assert at(BOUNCE + 0.1, INT) == "leave"


def test_the_warning_never_leaves(at: Callable[[float, int], Any]) -> None:
    for seconds in (0.0, 0.01, 1.0, 100.0):
        assert at(seconds, USR2) == Order("signal SIGUSR2", 75)


def test_ctrl_c_after_a_term_is_the_first_of_its_kind(at: Callable[[float, int], Any]) -> None:
    at(0.0, TERM)
    assert isinstance(at(1.0, INT), Order)


# The end of the allocation


def watched(monkeypatch: pytest.MonkeyPatch, minutes: float, ends_at: float, ask: Callable[[float], float]) -> Any:
    monkeypatch.setattr(module, "ASK_AGAIN", 0.05)
    orders: queue.Queue[tuple[float, Order]] = queue.Queue()
    stop = Stop()
    stop.request = lambda order: orders.put((time.time(), order))
    stop.before_the_end(minutes, ends_at, ask)
    return orders


def test_it_stops_so_many_minutes_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_at = time.time() + 60.8
    orders = watched(monkeypatch, 1.0, ends_at, lambda known: known)
    came, order = orders.get(timeout=10.0)
    assert came >= ends_at - 60.05
    assert order.exit_code == 75
    assert f"the allocation ends at {time.strftime('%H:%M:%S', time.localtime(ends_at))}" in order.why
    time.sleep(0.2)
    assert orders.empty(), "once is enough"


def test_an_end_that_moves_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has it extended, at first without limit; and then it is shortened."""
    ends, asked = [math.inf, time.time() + 3600.0, time.time() + 30.0], []

    def ask(known: float) -> float:
        asked.append(known)
        return ends[min(len(asked), 3) - 1]

    first = time.time() + 61.0
    orders = watched(monkeypatch, 1.0, first, ask)
    assert orders.get(timeout=10.0)[1].why.startswith("the allocation ends at")
    assert asked == [first, *ends[:2]]


def test_a_scheduler_that_does_not_answer_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(known: float) -> float:
        asked.append(known)
        raise HvdDDPError("no answer")

    orders = watched(monkeypatch, 1.0, time.time() + 60.3, ask)
    orders.get(timeout=10.0)
    assert len(asked) > 2


def test_without_a_limit_it_does_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    orders = watched(monkeypatch, 1.0, math.inf, lambda known: asked.append(known) or math.inf)
    time.sleep(0.4)
    assert orders.empty()
    assert len(asked) > 1


# Agreement

TOTAL, EVALUATE_EVERY = 25, 4  # steps of the simulated training


class Rank:
    """One simulated rank's ends of the line: whoever tells waits for nobody, order is kept on each way."""

    def __init__(self, rank: int, job: "Job") -> None:
        self.rank, self.job, self.stop = rank, job, Stop()
        self.handling = threading.Lock()  # a line has one thread
        self.on: dict[str, Callable[[int, Any], None]] = {
            "stop": lambda _, order: self.tell_main("aware", self.stop.ordered(Order(**order))),
            "stop after": lambda _, step: self.stop.decided(step),
        }
        self.stop.request = lambda order: self.tell_main("please stop", asdict(order))
        self.ended_at: int | None = None
        self.cut_short: int | None = None  # the step of an evaluation that was

    def tell_main(self, kind: str, value: Any) -> None:
        self.job.ways[self.rank, 0].put((kind, value))

    def tell_all(self, kind: str, value: Any) -> None:
        for rank in range(self.job.world_size):
            self.job.ways[0, rank].put((kind, value))

    def train(self, chance: random.Random, first: int) -> None:
        """As Trainer does: stop between two steps, no step that some rank has not begun, now and then an evaluation."""
        step = first
        while step < self.job.total:
            known = self.job.evaluate(self.rank) if step % EVALUATE_EVERY == 0 else False
            self.cut_short = step if known else None
            if self.stop.after(step, known=known):
                break
            time.sleep(chance.choice([0, 0, 0.001]))
            self.job.begun.wait(10.0)
            time.sleep(chance.choice([0, 0.001, 0.003]))
            step += 1
        self.ended_at = step


class Job:
    def __init__(self, world_size: int, seed: int) -> None:
        self.world_size, self.chance = world_size, random.Random(seed)
        self.begun = threading.Barrier(world_size)
        self.total = TOTAL
        self.pending = [False] * world_size
        self.ways: dict[tuple[int, int], queue.Queue[Any]] = {}
        self.ranks = [Rank(rank, self) for rank in range(world_size)]
        for rank in range(world_size):
            for way in {(rank, 0), (0, rank)}:
                self.ways[way] = queue.Queue()
                threading.Thread(target=self._carry, args=(way, self.chance.random()), daemon=True).start()
        Agreement(self.ranks[0], world_size)  # type: ignore[arg-type]

    def _carry(self, way: tuple[int, int], seed: float) -> None:
        chance, (origin, target) = random.Random(seed), way
        slow = chance.choice([0, 0.001, 0.01])
        while (message := self.ways[way].get()) is not None:
            time.sleep(chance.uniform(0, slow))
            with self.ranks[target].handling:
                self.ranks[target].on[message[0]](origin, message[1])

    def wait_for_orders(self) -> None:
        """Until all that was told has come."""
        deadline = time.monotonic() + 10.0
        while not all(rank.stop._decided.is_set() for rank in self.ranks):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.1)

    def evaluate(self, rank: int) -> bool:
        """Whether any rank has cut it short, as all learn from a reduction."""
        self.begun.wait(10.0)
        self.pending[rank] = self.ranks[rank].stop.pending
        self.begun.wait(10.0)
        return any(self.pending)

    def run(self, orders: list[tuple[float, int]], first: int = 0) -> list[int | None]:
        """Train, with orders from (seconds, rank); where each rank has ended, None for one that has not."""
        threads = [
            threading.Thread(target=rank.train, args=(random.Random(self.chance.random()), first), daemon=True)
            for rank in self.ranks
        ]
        for thread in threads:
            thread.start()
        before = 0.0
        for number, (seconds, rank) in enumerate(sorted(orders)):
            time.sleep(seconds - before)
            before = seconds
            self.ranks[rank].stop.request(Order(f"order {number}"))
        for thread in threads:
            thread.join(20.0)
        ended = [rank.ended_at for rank in self.ranks]
        time.sleep(0.05)
        for way in self.ways.values():
            way.put(None)
        return ended


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_all_stop_after_the_same_step(world_size: int) -> None:
    """Orders at random moments from random ranks, several at once, over lines of random speed."""
    stopped = set()
    for seed in range(25):
        job = Job(world_size, seed)
        chance = random.Random(seed)
        moment = chance.uniform(0, 0.08)
        orders = [
            (moment + chance.choice([0, 0, 0.002]), chance.randrange(world_size)) for _ in range(chance.choice([1, 3]))
        ]
        ended = job.run(orders)
        assert None not in ended, (seed, "somebody waits for ever")
        assert len(set(ended)) == 1, (seed, ended)
        if ended[0] != TOTAL:
            stopped.add(ended[0])
            assert len({rank.stop.order for rank in job.ranks}) == 1
            assert all(rank.stop.pending for rank in job.ranks)
        for rank in job.ranks:  # the next start makes up for it, if no step follows
            assert rank.cut_short in (None, ended[0]), seed
    assert len(stopped) > 5, "else it tests nothing"


def test_the_first_order_counts() -> None:
    """A stop is under way, and the code that it exits with is told."""
    job = Job(2, 0)
    for order in (Order("first", 75), Order("second", 130)):
        job.ranks[1].stop.request(order)
    job.wait_for_orders()
    assert job.run([]) == [0, 0]
    assert [rank.stop.order for rank in job.ranks] == [Order("first", 75)] * 2


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_order_before_the_first_step(world_size: int) -> None:
    """Of a signal while data were loading: they stop where they begin."""
    for first in (0, 17):
        job = Job(world_size, 1)
        job.ranks[-1].stop.request(Order("early"))
        job.wait_for_orders()
        assert job.run([], first) == [first] * world_size


def test_it_stops_soon() -> None:
    """Within the steps that pass while the lines carry four messages, not where the training ends."""
    job = Job(3, 0)
    job.total = 3000
    [ended] = set(job.run([(0.02, 1)]))
    assert ended is not None
    assert ended < 1000


def test_without_an_order_nobody_stops() -> None:
    assert Job(3, 0).run([]) == [TOTAL] * 3


def test_without_a_line_nobody_stops() -> None:
    """In a program of the user's own, without `ends_together`."""
    stop = Stop()
    stop.request(Order("nobody carries it"))
    assert [stop.after(step) for step in range(5)] == [False] * 5
    assert not stop.pending
