"""Told to stop, all ranks stop after the same step, save, leave with 75, and the next start goes on bit for bit."""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import ROOT, Result, assert_none_left, command, environment, processes, run
from rundir import different, newest, rows, summary, tensors

TERM, INT, USR2 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR2
LIMIT = 150.0  # seconds after which a job that was told to stop, or to end, hangs
OPTIONS = ["--threads", "1", "--max-steps", "40", "--global-batch", "240", "--save-every", "1000", "--log-every", "1",
           "--optimizer", "adamw", "--weight-decay", "0.1", "--schedule", "cosine", "--warmup-steps", "6"]  # fmt: skip
STEPS_PER_EPOCH = 6

# What becomes of exit code 75: torchrun, and horovodrun over Gloo, turn every code but 0 into 1.
CODES = {"--nproc": 75, "mpirun": 75, "mpiexec.mpich": 75, "torchrun": 1, "horovodrun": 75, "horovodrun --gloo": 1}
# (launcher, backend, rank that gets a signal, the signal)
CELLS = [
    ("--nproc", "ddp", 1, USR2),
    ("mpirun", "horovod", 0, TERM),
    ("torchrun", "ddp", 1, TERM),
    ("horovodrun", "horovod", 1, USR2),
    ("horovodrun --gloo", "horovod", 0, TERM),
]
ALL = [
    (launcher, backend, rank, number)
    for launcher in CODES
    for backend in ("ddp", "horovod")
    for rank in (0, 1)
    for number in (USR2, TERM)
    if (launcher, backend) not in {("mpiexec.mpich", "horovod"), ("horovodrun", "ddp"), ("horovodrun --gloo", "ddp")}
]
REST = [cell for cell in ALL if cell not in CELLS]


class Job:
    """Two ranks of factories:Slow (or another model) in the background; `facts` is its environment."""

    def __init__(self, launcher: str, backend: str, folder: Path, *options: str, **facts: str) -> None:
        self.launcher, self.folder, self.mark = launcher, folder, f"mark of {folder}"
        options = ("--model", "factories:Slow", *OPTIONS, *options)
        program = ["-m", "hvd_ddp", "train", "--backend", backend, "--run-dir", str(folder / "run"), *options]
        facts = {"FORWARD": "0.05", "MARK": self.mark, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"} | facts
        self.process = subprocess.Popen(
            command(launcher, 2, program), cwd=folder, env=environment(**facts), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def said(self) -> str:
        out, err = self.process.communicate()
        return f"{out[-2000:]}\n{err[-2000:]}"

    def wait_for(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"it has ended: {self.said()}")
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"it did not come about: {self.said()}")
            time.sleep(0.005)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: any(line["step"] >= step for line in rows(self.folder / "run", "train")))

    def wait_for_file(self, name: str) -> None:
        self.wait_for((self.folder / name).exists)
        (self.folder / name).unlink()

    def signal(self, rank: int, number: int) -> None:
        [pid] = [pid for pid, launch in processes(self.mark).items() if launch.launcher != "single"
                 and launch.rank == rank]  # fmt: skip
        os.kill(pid, number)

    def kill(self) -> None:
        for pid in processes(self.mark):
            os.kill(pid, signal.SIGKILL)

    def end(self) -> Result:
        """What it ended with; nothing of it is left."""
        try:
            out, err = self.process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it does not end: {self.said()}") from None
        assert_none_left(self.mark)
        return Result(self.process.returncode, out, err)


def stopped_at(job: Job, code: int | None = None) -> int:
    """The job stopped early, as it should; after which step."""
    result, folder = job.end(), job.folder
    assert result.code == (CODES[job.launcher] if code is None else code), result.text[-3000:]
    assert summary(folder / "run")["status"] == "preempted", result.text[-3000:]
    step = int(summary(folder / "run")["steps"])
    assert rows(folder / "run", "preempt")[-1]["step"] == step
    newest = sorted((folder / "run/checkpoints").glob("*.pt"))[-1]
    assert newest.name == f"step_{step:08d}.pt"
    assert result.text.count("told to stop") == 1
    assert result.text.count("to go on: python -m hvd_ddp train") == 1
    assert "hvd_ddp: " not in result.text, "there is no failure"
    assert not (folder / "run/failures").exists()
    assert not (folder / "run/lock.json").exists()
    return step


def end(folder: Path) -> dict[str, torch.Tensor]:
    """Of a run that has done its forty steps."""
    state = newest(folder / "run")
    assert state["progress"]["step"] == 40
    return tensors(state)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The end of the run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("wanted")
    result = Job("--nproc", "ddp", folder, FORWARD="0").end()
    assert result.code == 0, result.text[-3000:]
    return end(folder)


def check_whole(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Each step was done once and each evaluation made once, over all starts, and the end is that of one start."""
    assert summary(folder / "run")["status"] == "finished"
    assert newest(folder / "run")["decisions"]["best"] == summary(folder / "run")["best"]
    assert [line["step"] for line in rows(folder / "run", "train")] == [*range(1, 41)]
    assert [line["step"] for line in rows(folder / "run", "eval")] == [*range(STEPS_PER_EPOCH, 40, STEPS_PER_EPOCH), 40]
    assert {line["num_samples"] for line in rows(folder / "run", "eval")} == {360}
    assert different(end(folder), wanted) == []


def check_stop(launcher: str, backend: str, rank: int, number: int, folder: Path, wanted: dict[str, Any]) -> None:
    """One rank gets the signal at a random step; the same command goes on."""
    job = Job(launcher, backend, folder)
    seen = random.Random(f"{launcher} {backend} {rank} {number}").randrange(1, 25)
    job.wait_for_step(seen)
    job.signal(rank, number)
    step = stopped_at(job)
    assert seen <= step < 40
    assert rows(folder / "run", "preempt")[0]["why"] == f"signal {signal.Signals(number).name} on rank {rank}"
    result = Job(launcher, backend, folder, FORWARD="0").end()
    assert result.code == 0, result.text[-3000:]
    assert f"resuming from {folder / 'run/checkpoints' / f'step_{step:08d}.pt'}" in result.text.replace("\n", "")
    assert summary(folder / "run")["restart"] == 1
    check_whole(folder, wanted)


@pytest.mark.parametrize(("launcher", "backend", "rank", "number"), CELLS)
def test_one_rank_is_told_and_all_stop(
    launcher: str, backend: str, rank: int, number: int, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    check_stop(launcher, backend, rank, number, tmp_path, wanted)


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "backend", "rank", "number"), REST)
def test_any_rank_is_told_under_any_launcher(
    launcher: str, backend: str, rank: int, number: int, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    check_stop(launcher, backend, rank, number, tmp_path, wanted)


def test_all_ranks_are_told_twice(tmp_path: Path) -> None:
    """Slurm's time limit: TERM to every rank, and 10 ms later again."""
    job = Job("mpirun", "ddp", tmp_path)
    job.wait_for_step(7)
    for _ in range(2):
        job.signal(0, TERM)
        job.signal(1, TERM)
        time.sleep(0.01)
    assert 7 <= stopped_at(job) < 40


@pytest.mark.parametrize(("number", "code"), [(TERM, 75), (INT, 130), pytest.param(USR2, 75, marks=pytest.mark.full)])
def test_the_launcher_of_nproc_passes_signals_on(number: int, code: int, tmp_path: Path) -> None:
    """Twice, as a terminal and a shell may."""
    job = Job("--nproc", "ddp", tmp_path)
    job.wait_for_step(3)
    for _ in range(2):
        job.process.send_signal(number)
        time.sleep(0.01)
    assert 3 <= stopped_at(job, code) < 40


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    """Though the main thread of one rank hangs, and that of the other waits for it in a collective."""
    options = ("--model", "factories:Faulty", "--timeout", "300")
    job = Job("--nproc", "ddp", tmp_path, *options, FAULT="hang@1")
    job.wait_for_file("fault")
    job.process.send_signal(INT)
    time.sleep(0.6)
    assert job.process.poll() is None, "the first one lets it save"
    began = time.monotonic()
    job.process.send_signal(INT)
    result = job.end()
    assert time.monotonic() - began < 15.0
    assert result.code == 130, result.text[-3000:]
    assert re.findall("hvd_ddp: .*", result.text) == ["hvd_ddp: interrupted"]
    assert "Traceback" not in result.text


def test_a_signal_while_it_starts(wanted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """It stops where it would have begun, also after a resume; and in between it trains as ever."""
    steps = []
    for rank, at in ((1, None), (0, 9), (0, None)):
        job = Job("--nproc", "ddp", tmp_path, BUILD="2.0")
        job.wait_for_file("building")
        if at is not None:
            job.wait_for_step(at)
        job.signal(rank, USR2)
        steps.append(stopped_at(job))
    assert steps[0] == 0
    assert steps[1] == steps[2] >= 9
    assert Job("--nproc", "ddp", tmp_path, FORWARD="0").end().code == 0
    check_whole(tmp_path, wanted)


@pytest.mark.parametrize(
    ("backend", "evaluation"), [("ddp", 2), pytest.param("horovod", 1, marks=pytest.mark.full),
                                pytest.param("ddp", 7, marks=pytest.mark.full)]
)  # fmt: skip
def test_an_evaluation_is_cut_short_and_made_up_for(
    backend: str, evaluation: int, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """The seventh is the last: after step 40."""
    job = Job("--nproc", backend, tmp_path, FORWARD="0", EVALUATE="0.3")  # nine times, on each rank
    for number in range(1, evaluation + 1):
        job.wait_for(lambda number=number: len(rows(tmp_path / "run", "eval")) == number - 1)
        if number == evaluation:
            (tmp_path / "evaluating").unlink(missing_ok=True)
            job.wait_for_file("evaluating")
            job.signal(1, USR2)
        else:
            job.wait_for(lambda number=number: len(rows(tmp_path / "run", "eval")) == number)
    step = stopped_at(job)
    assert step == min(40, evaluation * STEPS_PER_EPOCH)
    assert len(rows(tmp_path / "run", "eval")) == evaluation - 1
    result = Job("--nproc", backend, tmp_path, FORWARD="0").end()
    assert result.code == 0, result.text[-3000:]
    check_whole(tmp_path, wanted)


# --stop-before


def test_it_stops_before_the_allocation_ends(tmp_path: Path) -> None:
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(  # the job ends 64 s after the first question
        "#!/bin/sh\n[ -f end ] || echo $(($(date +%s) + 64)) > end\n"
        "left=$(($(cat end) - $(date +%s)))\nprintf '4711 %d:%02d\\n' $((left / 60)) $((left % 60))\n"
    )
    squeue.chmod(0o755)
    path = f"{squeue.parent}:{environment()['PATH']}"
    job = Job("--nproc", "ddp", tmp_path, "--stop-before", "1", "--max-steps", "4000", PATH=path, SLURM_JOB_ID="4711")
    assert 0 < stopped_at(job) < 4000
    assert re.fullmatch(r"the allocation ends at \d\d:\d\d:\d\d", rows(tmp_path / "run", "preempt")[0]["why"])
    assert summary(tmp_path / "run")["job"] == "4711"


def test_without_an_allocation_it_is_refused(tmp_path: Path) -> None:
    options = ["--stop-before", "5", "--run-dir", str(tmp_path / "run")]
    result = run(command("mpirun", 2, ["-m", "hvd_ddp", "train", *OPTIONS, *options]), cwd=tmp_path)
    assert result.code == 2, result.text
    assert result.err.count("--stop-before counts from the end of the allocation, but there is none") == 1
    assert "Traceback" not in result.err
    assert not (tmp_path / "run").exists()
