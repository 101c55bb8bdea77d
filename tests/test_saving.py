"""Checkpoints in the background: one at a time, from the state of their moment, and nothing that fails is silent."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_ddp import checkpoint
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.saving import Saved, Saver

LIMIT = 20.0  # seconds


class Disk:
    """Does what the test says when the saver asks whether it may write."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = folder
        self.open = threading.Event()
        self.open.set()
        self.fails: BaseException | None = None
        self.asked = 0
        self.saved: list[Saved] = []
        self.failed: list[tuple[int, OSError]] = []
        self.saver = Saver(
            folder, keep=keep, guard=self._guard, saved=self.saved.append,
            failed=lambda step, error: self.failed.append((step, error)),
        )  # fmt: skip

    def _guard(self) -> None:
        self.asked += 1
        assert self.open.wait(LIMIT)
        if self.fails is not None:
            raise self.fails

    def save(self, step: int, best: dict[str, Any] | None = None) -> None:
        self.saver.save(step, {"w": torch.full((3,), float(step)), "decisions": {"best": best}})

    @property
    def steps(self) -> list[int]:
        return [int(path.stem.removeprefix("step_")) for path in checkpoint.found(self.folder)]


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_training_goes_on_while_it_is_written(disk: Disk) -> None:
    disk.open.clear()
    weights = torch.ones(3)
    disk.saver.save(5, {"w": weights})
    weights += 1  # as the next step would
    until(lambda: disk.asked == 1)
    assert disk.saved == []
    assert disk.steps == []
    disk.open.set()
    disk.saver.finish()
    assert [saved.step for saved in disk.saved] == disk.steps == [5]
    assert torch.equal(torch.load(disk.saved[0].path, weights_only=True)["w"], torch.ones(3))
    assert 0 <= disk.saved[0].stood <= disk.saved[0].seconds


def test_the_next_waits_for_the_one_before(disk: Disk) -> None:
    disk.open.clear()
    disk.save(5)
    second = threading.Thread(target=disk.save, args=(10,))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    disk.open.set()
    second.join(LIMIT)
    disk.saver.finish()
    assert [saved.step for saved in disk.saved] == [5, 10]
    assert torch.load(disk.saved[0].path, weights_only=True)["w"][0] == 5, "its copy was not overwritten"
    assert disk.saved[1].stood > 0.2


def test_a_full_disk_is_told_and_the_next_save_tries_again(disk: Disk) -> None:
    disk.fails = full()
    disk.save(5)
    disk.save(10)
    disk.saver._thread.join()
    assert [(step, error.errno) for step, error in disk.failed] == [(5, errno.ENOSPC), (10, errno.ENOSPC)]
    assert (disk.saved, disk.steps) == ([], [])
    disk.fails = None
    disk.save(15)
    disk.saver.finish()
    assert disk.steps == [15]


def test_the_end_tries_again(disk: Disk) -> None:
    disk.fails = full()
    disk.save(5)
    disk.saver._thread.join()
    disk.fails = None
    disk.saver.finish()
    assert disk.steps == [5]
    disk.saver.finish()  # nothing is left
    assert disk.steps == [5]


def test_what_is_not_on_the_disk_at_the_end_is_no_success(disk: Disk) -> None:
    disk.save(5)
    disk.saver._thread.join()
    disk.fails = full()
    disk.save(10)
    with pytest.raises(HvdDDPError, match=r"Step 10 can't be saved .* No space left on device.*`step_00000005.pt`"):
        disk.saver.finish()
    assert len(disk.failed) == 1


def test_other_errors_of_the_thread_are_raised_by_the_next_call(disk: Disk) -> None:
    disk.fails = HvdDDPError("taken over")
    disk.save(5)
    with pytest.raises(HvdDDPError, match="taken over"):
        disk.save(10)
    with pytest.raises(HvdDDPError, match="taken over"):
        disk.saver.finish()
    assert (disk.steps, disk.asked) == ([], 1)


def test_a_failing_job_waits_only_so_long(disk: Disk) -> None:
    disk.saver.settle(LIMIT)  # for nothing
    disk.open.clear()
    disk.save(5)
    began = time.monotonic()
    disk.saver.settle(0.2)
    assert 0.1 < time.monotonic() - began < LIMIT / 2
    disk.open.set()
    disk.saver.settle(LIMIT)
    assert disk.steps == [5]


def test_the_best_is_kept_beside_the_last(tmp_path: Path) -> None:
    disk = Disk(tmp_path, keep=2)
    for step in range(1, 7):
        disk.save(step, best={"step": min(step, 2), "accuracy": 0.9})
    disk.saver.finish()
    assert disk.steps == [6, 5, 2]
    again = Disk(tmp_path, keep=2)
    again.saver.go_on(tmp_path / "step_00000006.pt", {"step": 2, "accuracy": 0.9})
    again.save(7, best={"step": 2, "accuracy": 0.9})
    again.save(8, best={"step": 8, "accuracy": 0.95})
    again.save(9, best={"step": 8, "accuracy": 0.95})
    again.saver.finish()
    assert again.steps == [9, 8]


def test_the_best_so_far_stays_until_the_better_one_is_on_the_disk(tmp_path: Path) -> None:
    disk = Disk(tmp_path, keep=1)
    disk.save(1, best={"step": 1, "loss": 0.5})
    disk.save(2, best={"step": 1, "loss": 0.5})
    disk.saver.finish()
    disk.fails = full()
    disk.save(3, best={"step": 3, "loss": 0.4})
    disk.saver._thread.join()
    disk.fails = None
    disk.save(4, best={"step": 3, "loss": 0.4})
    disk.saver.finish()
    assert disk.steps == [4, 1]


def test_a_start_with_a_smaller_keep_makes_room_first(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, step, {"w": torch.ones(3)}, keep=9)
    disk = Disk(tmp_path, keep=1)
    disk.saver.go_on(tmp_path / "step_00000003.pt", {"step": 1, "loss": 0.7})  # step 4 is damaged
    disk.fails = full()
    disk.save(5, best={"step": 2, "loss": 0.5})
    disk.saver._thread.join()
    assert disk.steps == [4, 3, 2, 1]
    (tmp_path / "step_00000004.pt").unlink()
    disk.fails = None
    disk.save(6, best={"step": 2, "loss": 0.5})
    disk.saver.finish()
    assert disk.steps == [6, 2, 1]  # whether step 2 was saved well, it does not know
