"""Who is at fault: rank 0's judgement of what it hears, with a clock and a line that the test moves."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job import judge as module
from hvd_ddp.job.failure import Record, record_of
from hvd_ddp.job.judge import GRACE, PARTING, Judge
from hvd_ddp.job.launch import Launch
from hvd_ddp.job.pulse import Place

TIMEOUT = 100.0


class Job:
    """Rank 0's judge of `world_size` ranks, two a host, and everything around it."""

    def __init__(self, world_size: int) -> None:
        self.launch = Launch(world_size=world_size, hosts=tuple(f"node{rank // 2}" for rank in range(world_size)))
        self.now = 1000.0
        self.told: list[tuple[str, Any]] = []
        self.spoken: list[Record] = []
        self.heard = dict.fromkeys(range(1, world_size), self.now)
        self.on: dict[str, Callable[[int, Any], None]] = {}
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.places = {rank: Place() for rank in range(world_size)}

    def judge(self) -> "Job":
        self._judge = Judge(
            self.launch, self, timeout=TIMEOUT, here=lambda: self.places[0], speak=self.spoken.append  # type: ignore[arg-type]
        )  # fmt: skip
        return self

    def tell_all(self, kind: str, value: Any = None) -> None:
        self.told.append((kind, value))

    def call_later(self, seconds: float, work: Callable[[], None]) -> None:
        self.later.append((self.now + seconds, work))

    def at(self, rank: int, phase: str, step: int = 4, *, long: bool = False) -> None:
        """The main thread of this rank comes there."""
        self.places[rank] = Place(self.places[rank].moves + 1, step, phase, long)

    def passes(self, seconds: float, *, dumb: tuple[int, ...] = (), busy: tuple[int, ...] = ()) -> None:
        """Second by second: all beat but the dumb ones, the busy ones move on."""
        for _ in range(round(seconds)):
            self.now += 1.0
            for rank in self.places:
                if rank in busy:
                    self.places[rank] = replace(self.places[rank], moves=self.places[rank].moves + 1)
                if rank not in dumb:
                    self._judge.hear(rank, self.places[rank])
                    if rank:
                        self.heard[rank] = self.now
            for due, work in [entry for entry in self.later if entry[0] <= self.now]:
                self.later.remove((due, work))
                work()
            self._judge.look(self.now)

    def fails(self, rank: int, error: BaseException, *, consequence: bool = False) -> None:
        self.on["failure"](rank, record_of(replace(self.launch, rank=rank), self.places[rank], error,
                                           consequence=consequence))  # fmt: skip

    def loses(self, rank: int) -> None:
        self._judge.lost(rank)

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        return [value for kind, value in self.told if kind == "verdict"]

    @property
    def goes(self) -> int:
        return [kind for kind, _ in self.told].count("go")

    def verdict(self) -> Record:
        """What was said, once, and told to all."""
        assert len(self.spoken) == len(self.verdicts) == 1, (self.spoken, self.told)
        assert self.verdicts[0]["rank"] == self.spoken[0]["rank"]
        assert self.verdicts[0]["exit_code"] == self.spoken[0]["exit_code"]
        return self.spoken[0]


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Job]:
    def make(world_size: int) -> Job:
        job = Job(world_size)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: job.now))
        return job.judge()

    return make


New = Callable[[int], Job]

# Silent, or gone


def test_who_is_silent_is_at_fault(new: New) -> None:
    job = new(4)
    job.at(2, "forward")
    job.passes(5, busy=(0, 1, 2, 3))
    job.passes(TIMEOUT, dumb=(2,), busy=(0, 1, 3))
    assert job.spoken == []
    job.passes(2, dumb=(2,), busy=(0, 1, 3))
    said = job.verdict()
    assert (said["rank"], said["host"], said["phase"], said["step"]) == (2, "node1", "forward", 4)
    assert (said["exit_code"], said["seen"]) == (1, "last seen in")
    assert said["exception"].startswith("it has been silent for 101 s")
    assert job.verdicts[0]["kill"] is True
    assert not job.verdicts[0]["still"]


def test_several_that_are_silent_are_counted(new: New) -> None:
    """Of a host that was cut off."""
    job = new(6)
    job.passes(TIMEOUT + 2, dumb=(2, 3), busy=(0, 1, 4, 5))
    assert job.verdict()["rank"] == 2
    assert "(with 1 more: 3)" in job.verdict()["exception"]


def test_hundreds_are_not_a_wall_of_text(new: New) -> None:
    job = new(400)
    for rank in range(400):
        job.at(rank, f"phase {rank}")
    job.passes(TIMEOUT + 2, dumb=tuple(range(1, 200)), busy=(0,))
    assert "(with 198 more: 2, 3, 4, 5, 6, 7, 8, 9, ...)" in job.verdict()["exception"]
    assert len(job.verdict()["exception"]) < 500


def test_whose_process_is_gone_is_at_fault_at_once(new: New) -> None:
    job = new(3)
    for rank, phase in enumerate(["forward", "backward", "averaging gradients"]):
        job.at(rank, phase)
    job.passes(3, busy=(0, 1, 2))
    job.at(0, "averaging gradients", 5)  # since its last beat
    job.loses(1)
    said = job.verdict()
    assert (said["rank"], said["phase"], said["step"], said["exit_code"]) == (1, "backward", 4, 1)
    assert "its process is gone without a word" in said["exception"]
    assert "rank 0 on node0 in averaging gradients at step 5" in said["exception"]
    assert "rank 2 on node1 in averaging gradients at step 4" in said["exception"]
    assert not job.verdicts[0]["kill"]


# Standing still


def test_one_of_four_hangs_in_its_forward(new: New) -> None:
    job = new(4)
    job.passes(10, busy=(0, 1, 2, 3))
    job.at(1, "forward")
    for rank in (0, 2, 3):
        job.at(rank, "averaging gradients")
    job.passes(TIMEOUT)
    assert job.spoken == []
    job.passes(3)
    said = job.verdict()
    assert (said["rank"], said["phase"], said["step"], said["exit_code"]) == (1, "forward", 4, 1)
    assert said["exception"].startswith("it has stood still for 101 s. Meanwhile 3 ranks (0, 2, 3) in averaging")
    assert job.verdicts[0]["still"] is True


def test_rank_0_is_judged_like_all(new: New) -> None:
    job = new(4)
    job.at(0, "loading data")
    for rank in (1, 2, 3):
        job.at(rank, "backward")
    job.passes(TIMEOUT + 3)
    assert (job.verdict()["rank"], job.verdict()["phase"]) == (0, "loading data")


def test_one_went_on_where_three_wait_in_a_collective_of_the_forward(new: New) -> None:
    """It skipped it."""
    job = new(4)
    for rank in (0, 1, 2):
        job.at(rank, "forward")
    job.at(3, "forward")
    job.at(3, "averaging gradients")
    job.passes(TIMEOUT + 3)
    assert (job.verdict()["rank"], job.verdict()["phase"]) == (3, "averaging gradients")
    assert "3 ranks (0, 1, 2) in forward at step 4" in job.verdict()["exception"]


@pytest.mark.parametrize("behind", [0, 1])
def test_of_two_it_is_the_one_behind(behind: int, new: New) -> None:
    job = new(2)
    job.at(0, "forward")
    job.at(1, "forward")
    job.at(1 - behind, "backward")
    job.passes(TIMEOUT + 3)
    assert (job.verdict()["rank"], job.verdict()["phase"]) == (behind, "forward")
    assert f"rank {1 - behind} on node0 in backward at step 4" in job.verdict()["exception"]


def test_two_and_two_in_other_steps(new: New) -> None:
    job = new(4)
    for rank, step in enumerate([5, 4, 5, 4]):
        job.at(rank, "averaging gradients", step)
        if step == 5:
            job.at(rank, "averaging gradients", step)
    job.passes(TIMEOUT + 3)
    said = job.verdict()
    assert (said["rank"], said["step"]) == (1, 4)
    assert "(with 1 more: 3)" in said["exception"]


@pytest.mark.parametrize("phase", ["backward", "averaging gradients", "logging", "meeting the others"])
def test_who_waits_is_not_at_fault_while_another_moves(phase: str, new: New) -> None:
    """One in an evaluation that takes long, say, for which the others wait."""
    job = new(4)
    for rank in (0, 1, 3):
        job.at(rank, phase)
    job.at(2, "evaluating")
    job.passes(5 * TIMEOUT, busy=(2,))
    assert job.spoken == []
    job.passes(TIMEOUT + 3)  # and when that one stands still too
    assert (job.verdict()["rank"], job.verdict()["phase"]) == (2, "evaluating")


def test_who_waits_for_nobody_is_at_fault_though_another_moves(new: New) -> None:
    job = new(3)
    job.at(0, "evaluating")
    job.at(1, "evaluating")
    job.at(2, "meeting the others")
    job.passes(TIMEOUT + 3, busy=(0,))
    assert (job.verdict()["rank"], job.verdict()["phase"]) == (1, "evaluating")


def test_if_all_wait_for_each_other_it_ends_too(new: New) -> None:
    job = new(3)
    for rank in range(3):
        job.at(rank, "averaging gradients")
    job.passes(TIMEOUT + 3)
    assert job.verdict()["phase"] == "averaging gradients"
    assert "(with 2 more: 1, 2)" in job.verdict()["exception"]


def test_long_work_suspends_judgement(new: New) -> None:
    """Of one rank: the others may be waiting for it, in any phase."""
    job = new(3)
    job.at(0, "loading data", long=True)
    job.at(1, "forward")
    job.at(2, "averaging gradients")
    job.passes(5 * TIMEOUT)
    assert job.spoken == []
    job.at(0, "averaging gradients")
    job.passes(TIMEOUT - 2)
    assert job.spoken == [], "their time begins when it ends"
    job.passes(5)
    assert (job.verdict()["rank"], job.verdict()["phase"]) == (1, "forward")


def test_long_work_does_not_excuse_silence(new: New) -> None:
    job = new(2)
    job.at(1, "loading data", long=True)
    job.passes(2)
    job.passes(TIMEOUT + 3, dumb=(1,))
    assert "silent" in job.verdict()["exception"]


def test_who_stands_still_and_then_falls_silent_is_silent(new: New) -> None:
    """A stopped process last said where it was; the words must fit what it is."""
    job = new(3)
    job.at(1, "forward")
    for rank in (0, 2):
        job.at(rank, "averaging gradients")
    job.passes(0.1 * TIMEOUT)
    job.passes(TIMEOUT - 1, dumb=(1,))
    assert job.spoken == []
    job.passes(5, dumb=(1,))
    assert job.verdict()["rank"] == 1
    assert "silent" in job.verdict()["exception"]


def test_a_job_that_moves_is_left_alone(new: New) -> None:
    job = new(3)
    job.passes(10 * TIMEOUT, busy=(0, 1, 2))
    assert (job.spoken, job.told, job.later) == ([], [], [])


# What ranks say of themselves


def test_an_error_is_told_as_it_is(new: New) -> None:
    job = new(3)
    job.at(2, "forward")
    job.fails(2, RuntimeError("the sensor is on fire"))
    said = job.verdict()
    assert (said["rank"], said["host"], said["phase"], said["exit_code"]) == (2, "node1", "forward", 1)
    assert said["exception"] == "RuntimeError: the sensor is on fire"
    assert "Traceback" in said["traceback"] or "RuntimeError" in said["traceback"]


def test_the_first_one_wins(new: New) -> None:
    job = new(3)
    job.fails(2, RuntimeError("first"))
    job.fails(1, RuntimeError("second"))
    job.loses(2)
    job.passes(3 * TIMEOUT)
    assert job.verdict()["exception"] == "RuntimeError: first"


def test_a_consequence_gives_way_to_its_cause(new: New) -> None:
    """Gloo's error on rank 0 is here before the end of rank 1 shows."""
    job = new(3)
    job.fails(0, RuntimeError("connection closed by peer"), consequence=True)
    job.fails(2, RuntimeError("connection closed by peer"), consequence=True)
    assert job.spoken == []
    job.loses(1)
    assert job.verdict()["rank"] == 1
    job.passes(GRACE + 10)
    assert job.verdict()["rank"] == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_a_consequence_without_a_cause_is_told_after_a_while(rank: int, new: New) -> None:
    """The network broke, and nobody has ended."""
    job = new(3)
    job.fails(rank, RuntimeError("connection reset"), consequence=True)
    assert job.spoken == []
    job.passes(GRACE + 2)
    assert (job.verdict()["rank"], job.verdict()["exception"]) == (rank, "RuntimeError: connection reset")


def test_when_all_suffer_nobody_is_waited_for(new: New) -> None:
    job = new(2)
    job.fails(1, RuntimeError("reset"), consequence=True)
    job.fails(0, RuntimeError("reset"), consequence=True)
    assert job.verdict()["rank"] == 1


def test_one_rank_alone_has_nobody_to_suffer_from(new: New) -> None:
    job = new(1)
    job.fails(0, RuntimeError("of its own"), consequence=True)
    assert job.verdict()["rank"] == 0


def test_what_the_user_can_mend_keeps_its_exit_code(new: New) -> None:
    job = new(2)
    for rank in (1, 0):
        job.fails(rank, HvdDDPError("Use a smaller --global-batch."))
    said = job.verdict()
    assert (said["exit_code"], said["exception"], said["traceback"]) == (2, "Use a smaller --global-batch.", "")


def test_who_interrupts_does_not_fail(new: New) -> None:
    job = new(2)
    job.fails(1, KeyboardInterrupt())
    assert job.verdict()["exit_code"] == 130


# They leave together


def test_all_leave_when_all_know(new: New) -> None:
    job = new(3)
    job.fails(1, RuntimeError("of rank 1"))
    assert job.goes == 0
    for rank in (1, 0):
        job.on["here"](rank, None)
    assert job.goes == 0
    job.on["here"](2, None)
    assert job.goes == 1


def test_the_dead_are_not_waited_for(new: New) -> None:
    job = new(3)
    job.loses(1)
    job.on["here"](0, None)
    job.on["here"](2, None)
    assert job.goes == 1


def test_who_dies_on_the_way_out_is_not_waited_for(new: New) -> None:
    job = new(3)
    job.fails(1, RuntimeError("of rank 1"))
    job.on["here"](0, None)
    job.on["here"](1, None)
    job.loses(2)
    assert job.goes == 1
    assert job.verdict()["rank"] == 1


def test_the_silent_are_not_waited_for_long(new: New) -> None:
    job = new(3)
    job.fails(1, RuntimeError("of rank 1"))
    job.on["here"](0, None)
    job.passes(PARTING - 1)
    assert job.goes == 0
    job.passes(2)
    assert job.goes == 1


def test_at_the_end_of_the_training_all_leave_together(new: New) -> None:
    job = new(3)
    for rank in (0, 2, 1):
        assert job.goes == 0
        job.on["here"](rank, None)
    assert (job.goes, job.spoken) == (1, [])
    for rank in (1, 2):  # they hang up
        job.loses(rank)
    assert job.spoken == []


def test_who_dies_before_the_end_of_the_training_is_at_fault(new: New) -> None:
    """Though others have come to the end, and are then told to end otherwise."""
    job = new(3)
    job.on["here"](0, None)
    job.on["here"](2, None)
    job.loses(1)
    assert job.verdict()["rank"] == 1
    assert job.goes == 0, "they know of the end, not yet of the verdict"
    job.on["here"](0, None)
    job.on["here"](2, None)
    assert job.goes == 1
