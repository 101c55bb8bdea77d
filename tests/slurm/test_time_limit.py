"""Told to stop, a job saves, goes back into the queue, and ends as if nothing had been."""

import re
import signal
from pathlib import Path

import pytest
import torch
from cluster.hosts import wait_until
from cluster.jobs import Job
from cluster.slurm import Cluster
from launchers import train
from rundir import different, rows, summary
from runs import HERE, at_step, completed, edited, state, submit

pytestmark = pytest.mark.timeout(300)
full = pytest.mark.full

STEPS, EPOCH, HELD_OUT = 40, 29, 360  # the digits: 1,437 samples are 29 steps of 50
OPTIONS = ["--model", "paced:Slow", "--max-steps", str(STEPS), "--global-batch", "50", "--optimizer", "adamw",
           "--weight-decay", "0.1", "--schedule", "cosine", "--warmup-steps", "6", "--log-every", "1",
           "--save-every", "1000"]  # fmt: skip
ONE_A_NODE = "-N2 --ntasks-per-node=1"
MINUTE = f"{ONE_A_NODE} --time=1 --signal=USR2@10"
SLOW_AT_FIRST = "1.5,0"  # a minute of training, so that the limit comes in the middle, and no time after the requeue


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Of an uninterrupted run."""
    run = tmp_path_factory.mktemp("wanted") / "run"
    result = train("torchrun", 2, *OPTIONS, "--run-dir", str(run), cwd=HERE)  # models are found where it starts
    assert result.code == 0, result.text[-3000:]
    return state(run)


def begin(
    cluster: Cluster, folder: Path, template: str | Path, options: str, *more: str, pace: str
) -> tuple[Job, Path]:
    """The job and its run directory."""
    cluster.folder = folder
    job = submit(cluster, template, options, *OPTIONS, *more, PACE=pace)
    return job, folder / f"runs/job-{job.id}"


def check(cluster: Cluster, job: Job, run: Path, *, stops: int, politely: bool = True) -> None:
    """After the end: each start and stop is told of, each step was done once, each sample evaluated once."""
    log, starts = job.log, rows(run, "start")
    assert job.requeues == stops
    assert [start["restart"] for start in starts] == list(range(stops + 1))
    assert log.count("launcher ") == stops + 1, log
    assert log.count("resuming from") == stops
    assert log.count("finished: ") == 1
    assert (summary(run)["status"], summary(run)["restart"]) == ("finished", stops)
    steps = [row["step"] for row in rows(run, "train")]
    if politely:
        stopped = [row["step"] for row in rows(run, "preempt")]
        assert [row["step"] for row in rows(run, "resume")] == stopped
        assert len(stopped) == stops
        assert all(f"all ranks stop after step {step}" in log for step in stopped)
        assert steps == list(range(1, STEPS + 1))
    assert [(row["step"], row["num_samples"]) for row in rows(run, "eval")] == [(EPOCH, HELD_OUT), (STEPS, HELD_OUT)]
    assert not (run / "failures").exists()
    wait_until(lambda: not [node.name for node in cluster.nodes if node.pids()], "nothing is left running")


@full
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_a_one_minute_job(backend: str, two: Cluster, wanted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    job, run = begin(two, tmp_path, "train.sbatch", MINUTE, "--backend", backend, pace=SLOW_AT_FIRST)
    log = completed(job, 150)
    assert "told to stop (signal SIGUSR2" in log
    check(two, job, run, stops=1)
    assert different(state(run), wanted) == []


@pytest.mark.parametrize(
    ("template", "backend"),
    [
        ("train.sbatch", "ddp"),
        *[pytest.param("train.sbatch", "horovod", marks=full)],
        *[pytest.param("torchrun.sbatch", "ddp", marks=full)],
    ],
)
def test_warned_on_one_rank_all_stop_after_the_same_step(
    template: str, backend: str, two: Cluster, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    job, run = begin(two, tmp_path, template, ONE_A_NODE, "--backend", backend, pace="0.3,0")
    at_step(job, run, 5)
    node = two.node("node2")
    [rank] = [
        process for process in node.processes() if "hvd_ddp" in process.command and "torchrun" not in process.command
    ]
    node.signal(signal.SIGUSR2, [rank])
    completed(job, 120)
    check(two, job, run, stops=1)
    logs = [(run / f"logs/0/rank_{rank:04d}.log").read_text() for rank in (0, 1)]
    steps = [re.findall(r"told to stop \(.*\): all ranks stop after step (\d+)", text) for text in logs]
    assert steps[0] == steps[1] == [str(rows(run, "preempt")[0]["step"])]
    assert "SIGUSR2 on rank 1" in logs[0]
    assert different(state(run), wanted) == []


@full
def test_requeues_are_bounded(two: Cluster, wanted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """By scancel --signal at each start; then a job of the same run directory goes on."""
    script = edited("train.sbatch", tmp_path, ("most_requeues=20", "most_requeues=1"))
    job, run = begin(two, tmp_path, script, ONE_A_NODE, pace="0.3")
    for first in (3, 10):
        at_step(job, run, first)
        job.cancel("--signal=USR2")
        job.until(lambda first=first: len(rows(run, "preempt")) > (first > 3), "stop", 30)
    assert job.wait(30) == "FAILED"
    assert (job.exit_code, job.requeues) == (75, 1)
    assert summary(run)["status"] == "preempted"
    other, _ = begin(two, tmp_path, "train.sbatch", ONE_A_NODE, "--run-dir", str(run), pace="0")
    completed(other, 120)
    assert [row["step"] for row in rows(run, "train")] == list(range(1, STEPS + 1))
    assert different(state(run), wanted) == []


@full
@pytest.mark.parametrize("template", ["train.sbatch", "torchrun.sbatch"])
def test_scancel_signal(template: str, two: Cluster, wanted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    job, run = begin(two, tmp_path, template, ONE_A_NODE, pace="0.3,0")
    at_step(job, run, 5)
    job.cancel("--signal=USR2")
    completed(job, 120)
    check(two, job, run, stops=1)
    assert different(state(run), wanted) == []


@full
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_scontrol_requeue(backend: str, two: Cluster, wanted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Slurm ends it with TERM, at which the ranks save, and starts it again."""
    job, run = begin(two, tmp_path, "train.sbatch", ONE_A_NODE, "--backend", backend, pace="0.3,0")
    at_step(job, run, 5)
    job.requeue()
    completed(job, 120)
    check(two, job, run, stops=1)
    assert different(state(run), wanted) == []


@full
@pytest.mark.parametrize(("template", "backend"), [("mpirun", "horovod"), ("horovodrun", "horovod")])
def test_stop_before(
    template: str, backend: str, two: Cluster, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Where the launcher mangles signals the run looks at the clock itself."""
    options = ["--backend", backend, "--stop-before", "0.5"]
    job, run = begin(two, tmp_path, f"{template}.sbatch", f"{ONE_A_NODE} --time=1", *options, pace=SLOW_AT_FIRST)
    log = completed(job, 150)
    assert "told to stop (the allocation ends at" in log
    check(two, job, run, stops=1)
    assert different(state(run), wanted) == []
