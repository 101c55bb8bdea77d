"""Real runs on data that comes item by item or in streams: both backends, faults, orders to stop, nothing left."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from launchers import ROOT, Result, assert_none_left, command, environment, processes, run
from rundir import different, last_step, newest, rows, summary, tensors
from torch import nn

import hvd_ddp.job.launch

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(300)


class Three(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(3, num_classes)


def program(folder: Path, data: str, steps: int, *options: str) -> list[str]:
    return ["-m", "hvd_ddp", "train", "--threads", "1", "--data", data, "--model", "test_own_training:Three",
            "--global-batch", "8", "--optimizer", "sgd", "--lr", "0.001", "--max-steps", str(steps), "--log-every", "1",
            "--run-dir", str(folder / "run"), *options]  # fmt: skip


def start(launcher: str, num_ranks: int, folder: Path, data: str, steps: int, *options: str) -> Result:
    folder.mkdir(exist_ok=True)
    mark = f"mark of {folder}"
    job = command(launcher, num_ranks, program(folder, data, steps, *options))
    result = run(job, cwd=folder, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}:{HERE}", MARK=mark)
    assert_none_left(mark)
    return result


def trained(folder: Path) -> dict[str, torch.Tensor]:
    return tensors(newest(folder / "run"))


# ---- streams


@pytest.mark.parametrize("factory", ["shards", pytest.param("stream", marks=pytest.mark.full)])
def test_streams_give_the_same_under_both_backends_and_after_a_stop(factory: str, tmp_path: Path) -> None:
    """Unequal streams (20 and 21 samples, 4 a step) end together: 6 steps an epoch, no sample lost."""
    data = f"own_data:{factory}"
    for name, launcher, options in (("ddp", "mpirun", ()), ("hvd", "mpirun", ("--backend", "horovod"))):
        result = start(launcher, 2, tmp_path / name, data, 10, "--workers", "1", *options)
        assert result.code == 0, result.text[-3000:]
    assert different(trained(tmp_path / "ddp"), trained(tmp_path / "hvd")) == []
    for steps in (4, 10):
        assert start("--nproc", 2, tmp_path / "cut", data, steps).code == 0
    assert different(trained(tmp_path / "cut"), trained(tmp_path / "ddp")) == []
    per_epoch, num_eval = (6, 11) if factory == "shards" else (7, 10)
    found = rows(tmp_path / "ddp/run", "train", "eval")
    assert [row["epoch"] for row in found if row["kind"] == "train"] == [step // per_epoch for step in range(10)]
    assert [(row["step"], row["num_samples"]) for row in found if row["kind"] == "eval"] == [
        (per_epoch, num_eval), (10, num_eval),
    ]  # fmt: skip
    assert summary(tmp_path / "ddp/run")["epochs"] == 1


def test_a_common_stream_goes_on_with_other_ranks(tmp_path: Path) -> None:
    for num_ranks, steps in ((2, 3), (3, 9)):
        result = start("--nproc", num_ranks, tmp_path, "own_data:stream", steps, "--precision", "fp64")
        assert result.code == 0, result.text[-3000:]
    assert start("python", 1, tmp_path / "whole", "own_data:stream", 9, "--precision", "fp64").code == 0
    mine, wanted = trained(tmp_path), trained(tmp_path / "whole")
    for name in wanted:
        assert torch.allclose(mine[name].double(), wanted[name].double(), rtol=1e-12, atol=1e-14), name


def test_a_stream_needs_a_number_of_steps(tmp_path: Path) -> None:
    job = program(tmp_path, "own_data:stream", 1)
    at = job.index("--max-steps")
    result = run(command("python", 1, [*job[:at], *job[at + 2 :]]), cwd=HERE, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert result.code == 2 and "Give --max-steps" in result.err and "Traceback" not in result.err, result.text


# ---- faults


def test_a_data_set_that_can_not_be_sent(tmp_path: Path) -> None:
    result = start("--nproc", 2, tmp_path, "own_data:local", 3, "--workers", "2")
    assert result.code != 0 and "can't be sent to loader workers" in result.err and "Traceback" not in result.err
    assert result.err.count("can't be sent") == 1 and not (tmp_path / "run").exists()


def test_a_sample_that_can_not_be_read(tmp_path: Path) -> None:
    result = start("--nproc", 2, tmp_path, "own_data:faulty_three", 3, "--workers", "1")
    assert result.code != 0 and re.search("OSError: no sample [37]", result.err), result.text[-3000:]
    assert "leaked" not in result.err
    result = start("--nproc", 2, tmp_path, "own_data:faulty_three", 3, "--workers", "1", "--skip-bad")
    assert result.code == 0, result.text[-3000:]
    assert sum(row.get("bad_samples", 0) for row in rows(tmp_path / "run", "train")) >= 2
    assert rows(tmp_path / "run", "eval")[-1]["num_samples"] == 10


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_data_set_that_hangs_is_named(workers: str, tmp_path: Path) -> None:
    """On rank 1 alone; its workers, stuck in the user's code, go with it."""
    result = start("--nproc", 2, tmp_path, "test_own_training:hanging", 30, "--workers", workers, "--timeout", "8")
    assert result.code == 1 and "rank 1 on" in result.err and "in loading data" in result.err, result.text[-3000:]
    assert "it has stood still" in result.err


def test_workers_that_are_slow_to_start_are_waited_for(tmp_path: Path) -> None:
    """Longer than --timeout: what they import is the user's."""
    (tmp_path / "slow_to_import.py").write_text(
        "import multiprocessing, time\nfrom own_data import Items, torch\n"
        "if multiprocessing.parent_process():\n    time.sleep(10)\n"
        "class Own(Items): pass\n"
        "def own(data_dir): return Own([(torch.zeros(3), 0)] * 30), Own([(torch.zeros(3), 0)] * 4), 3\n"
    )
    result = start("--nproc", 2, tmp_path, "slow_to_import:own", 5, "--workers", "1", "--timeout", "4")
    assert result.code == 0, result.text[-3000:]


def hanging(data_dir):
    from own_data import Items

    return Hanging([(torch.zeros(3), 0)] * 100), Items([(torch.zeros(3), 0)] * 4), 3


class Hanging:
    """Hangs behind sample 40 on rank 1, whose workers have its environment."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        while index > 40 and hvd_ddp.job.launch.detect().rank == 1:
            time.sleep(1)
        return self.items[index]


class Slow(Hanging):
    def __getitem__(self, index):
        time.sleep(0.05)
        return self.items[index]


def slow(data_dir):
    part = Slow([(torch.zeros(3), 0)] * 100)
    return part, part, 3


def begin(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        command("torchrun", 2, program(folder, "test_own_training:slow", 5000, "--workers", "2", "--save-every", "5")),
        cwd=folder, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}:{HERE}", MARK=f"mark of {folder}"),
    )  # fmt: skip


def wait_for_steps(folder: Path, process: subprocess.Popen) -> None:
    until = time.monotonic() + 90
    while last_step(folder / "run") < 5:
        assert process.poll() is None and time.monotonic() < until, process.stdout.read()
        time.sleep(0.1)


def test_an_order_to_stop_for_all_processes_reaches_the_ranks_alone(tmp_path: Path) -> None:
    """As a scheduler sends it, also to the workers: the job saves and stops."""
    process = begin(tmp_path)
    try:
        wait_for_steps(tmp_path, process)
        agent = process.pid
        for pid in processes(f"mark of {tmp_path}"):
            if pid != agent:
                os.kill(pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert summary(tmp_path / "run")["status"] == "preempted", out.decode()[-3000:]
    assert "A loader worker" not in out.decode()
    assert_none_left(f"mark of {tmp_path}")


def test_ranks_that_are_killed_leave_no_worker(tmp_path: Path) -> None:
    process = begin(tmp_path)
    try:
        wait_for_steps(tmp_path, process)
        job = processes(f"mark of {tmp_path}")
        ranks = [pid for pid, launch in job.items() if launch.launcher != "single"]
        assert len(ranks) == 2 and len(job) >= 7  # four workers, an agent
        for pid in [process.pid, *ranks]:
            os.kill(pid, signal.SIGKILL)
        process.wait(10)
    finally:
        process.kill()
    assert_none_left(f"mark of {tmp_path}", within=5.0)
