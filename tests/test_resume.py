"""Killed at any step, the same command goes on and ends with the uninterrupted run's bits."""

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from launchers import command, environment, train
from rundir import different, last_step, newest, rows, summary, tensors

OPTIONS = ["-m", "hvd_ddp", "train", "--threads", "1", "--max-steps", "100", "--global-batch", "48",
           "--save-every", "9", "--optimizer", "adamw", "--weight-decay", "0.1", "--schedule", "cosine",
           "--warmup-steps", "6", "--log-every", "1", "--label-smoothing", "0.1"]  # fmt: skip


def end(folder: Path) -> dict[str, torch.Tensor]:
    """Of a run that has done its hundred steps."""
    state = newest(folder)
    assert state["progress"]["step"] == 100
    return tensors(state)


def ranks_of(folder: Path) -> list[int]:
    """Processes whose command line names the run directory: the launcher and the ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def begin(launcher: str, folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        command(launcher, 2, [*OPTIONS, "--run-dir", str(folder)]),
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill(process: subprocess.Popen, folder: Path) -> None:
    """SIGKILL every process of the job, until none is left."""
    deadline = time.monotonic() + 30
    while pids := ranks_of(folder):
        assert time.monotonic() < deadline
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    process.wait(timeout=30)


def kill_at(step: int, launcher: str, folder: Path) -> None:
    """Start, and kill when the step shows up."""
    process = begin(launcher, folder)
    deadline = time.monotonic() + 90
    while last_step(folder) < step:
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline, "no such step came"
        time.sleep(0.01)
    kill(process, folder)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("wanted") / "run"
    result = train("torchrun", 2, *OPTIONS[5:], "--run-dir", str(folder))
    assert result.code == 0, result.text[-3000:]
    return end(folder)


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.full), "horovodrun"])
def test_killed_three_times_ends_with_the_same_bits(launcher: str, wanted: dict, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for step in (3, 37, 71):
        kill_at(step, launcher, folder)
    result = train(launcher, 2, *OPTIONS[5:], "--run-dir", str(folder))
    assert result.code == 0, result.text[-3000:]
    assert "resuming from" in result.out
    assert summary(folder)["restart"] == 3
    assert different(end(folder), wanted) == []


def test_begun_under_horovod_and_ended_under_ddp(wanted: dict, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    kill_at(23, "horovodrun --gloo", folder)
    kill_at(58, "mpirun", folder)
    result = train("horovodrun", 2, *OPTIONS[5:], "--run-dir", str(folder))
    assert result.code == 0, result.text[-3000:]
    assert [row["backend"] for row in rows(folder, "start")] == ["horovod", "ddp", "horovod"]
    assert different(end(folder), wanted) == []


def test_on_another_number_of_ranks(wanted: dict, tmp_path: Path) -> None:
    """Other ranks, other order of sums: close, with every sample used in the same step."""
    folder = tmp_path / "run"
    kill_at(45, "torchrun", folder)
    result = train("mpirun", 3, *OPTIONS[5:], "--run-dir", str(folder))
    assert result.code == 0, result.text[-3000:]
    mine = end(folder)
    assert all(torch.allclose(mine[name], wanted[name], atol=2e-2) for name in wanted)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun", "horovodrun --gloo"])
def test_killed_at_random_moments(launcher: str, wanted: dict, tmp_path: Path) -> None:
    """Twenty SIGKILLs, each after a random time: in start-up, in a step, in a save."""
    chance = random.Random(launcher)
    for number in range(4):
        folder = tmp_path / f"run{number}"
        for _ in range(5):
            process = begin(launcher, folder)
            time.sleep(chance.uniform(2.0, 9.0))
            kill(process, folder)
        result = train(launcher, 2, *OPTIONS[5:], "--run-dir", str(folder))
        assert result.code == 0, result.text[-3000:]
        assert different(end(folder), wanted) == []
