"""Who comes is asked, who does not is named, and nothing waits for ever."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launchers import ROOT

from hvd_ddp.doctor.gathering import NobodyError, gather
from hvd_ddp.doctor.together import attendance
from hvd_ddp.errors import FAILED
from hvd_ddp.job.launch import Launch

SIZE = 200
JOB = Launch(launcher="openmpi", world_size=SIZE, local_world_size=SIZE, job="of this test")


def rank(number: int, folder: Path, results: dict[int, Any], *, seconds: float = 20) -> None:
    """All but rank 0: answers with its number, until told the exit code."""
    gathering = gather(replace(JOB, rank=number), folder, seconds)
    try:
        results[number] = gathering.serve(
            {"number": lambda value: [number, value], "hang": lambda _: time.sleep(99)}, 30
        )
    except NobodyError as error:
        results[number] = error
    finally:
        gathering.close()


def test_two_hundred_ranks_of_which_one_is_missing_and_one_hangs(tmp_path: Path) -> None:
    results: dict[int, Any] = {}
    present = [number for number in range(1, SIZE) if number != 77]
    threads = [threading.Thread(target=rank, args=(number, tmp_path, results), daemon=True) for number in present]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    gathering = gather(JOB, tmp_path, 10)
    assert 10 <= time.monotonic() - began < 15, "waits for the missing one"
    assert gathering.missing == [77]
    assert not list(tmp_path.iterdir()), "the card is withdrawn"
    answers = {"number": lambda value: [0, value]}
    told = gathering.ask("number", "x", list(gathering.peers), answers, 10)
    assert told == {number: [number, "x"] for number in (0, *present)}
    gathering.ask_for_the_time(2, 0.5)
    assert set(gathering.clocks) == {0, *present}
    assert all(abs(ahead) < both_ways + 0.01 for both_ways, ahead in gathering.clocks.values())
    began = time.monotonic()
    assert gathering.ask("hang", None, [5], answers, 1) == {}
    assert time.monotonic() - began < 2
    gathering.end(FAILED)
    for thread in threads:
        if thread is not threads[4]:
            thread.join(10)
    assert {number: results[number] for number in present if number != 5} == dict.fromkeys(set(present) - {5}, FAILED)
    gathering.close()


def test_ranks_that_were_told_another_size(tmp_path: Path) -> None:
    """One that would fit into the job all the same, and one that would not."""
    three = replace(JOB, world_size=3, local_world_size=3)
    left: dict[int, int] = {}

    def other(number: int, size: int) -> None:
        gathering = gather(replace(three, rank=number, world_size=size), tmp_path, 10)
        left[number] = gathering.serve({"number": lambda _: number}, 20)
        gathering.close()

    threads = [threading.Thread(target=other, args=pair, daemon=True) for pair in ((1, 3), (2, 4), (7, 8))]
    for thread in threads:
        thread.start()
    gathering = gather(three, tmp_path, 10)
    assert sorted((stranger["rank"], stranger["world_size"]) for stranger in gathering.strangers) == [(2, 4), (7, 8)]
    checks = attendance(gathering)
    assert [check.status for check in checks] == ["failure", "failure", "ok"]
    assert "was told a world size of 8, rank 0 of 3: they are not of one job" in checks[0].detail
    gathering.end(FAILED)
    for thread in threads:
        thread.join(5)
    assert left == {1: FAILED, 2: FAILED, 7: FAILED}


def test_a_late_answer_is_to_no_other_question(tmp_path: Path) -> None:
    two = replace(JOB, world_size=2, local_world_size=2)

    def slowly(value: float) -> float:
        time.sleep(value)
        return value

    def other() -> None:
        gathering = gather(replace(two, rank=1), tmp_path, 10)
        gathering.serve({"wait": slowly}, 20)
        gathering.close()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    gathering = gather(two, tmp_path, 10)
    assert gathering.ask("wait", 1.5, [1], {}, 0.5) == {}
    assert gathering.ask("wait", 0.1, [1], {}, 10) == {1: 0.1}
    gathering.end(FAILED)
    thread.join(5)
    assert not thread.is_alive()


def test_nobody_is_rank_0(tmp_path: Path) -> None:
    with pytest.raises(NobodyError, match="rank 0 left no word") as caught:
        gather(replace(JOB, rank=3), tmp_path, 1)
    assert "--run-dir" in caught.value.remedy


def test_rank_0_does_not_listen_any_more(tmp_path: Path) -> None:
    """A word that a killed job left behind."""
    card = tmp_path / ".rendezvous-of_this_test"
    card.write_text(json.dumps({"addresses": [["127.0.0.1", 1]], "token": "00"}))
    with pytest.raises(NobodyError, match=r"rank 0 listens on 127\.0\.0\.1:1, but none of these answers here"):
        gather(replace(JOB, rank=3), tmp_path, 1)


def test_the_folder_can_not_be_written() -> None:
    with pytest.raises(NobodyError, match="can't be written") as caught:
        gather(JOB, ROOT / "README.md", 1)
    assert caught.value.remedy.startswith("Choose a --run-dir")


def test_rank_0_falls_silent(tmp_path: Path) -> None:
    """Its process lives, but asks nothing; and one whose process has gone."""
    two = replace(JOB, world_size=2, local_world_size=2)
    caught: list[Any] = []

    def other() -> None:
        gathering = gather(replace(two, rank=1), tmp_path, 10)
        try:
            gathering.serve({}, 1)
        except NobodyError as error:
            caught.append(error.detail)
        caught.append(gathering.serve({}, 20))
        gathering.close()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    gathering = gather(two, tmp_path, 10)
    time.sleep(2)
    gathering.close()
    thread.join(5)
    assert caught == ["rank 0 does not ask any more", FAILED]
