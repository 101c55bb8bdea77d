"""A node lost inside an allocation does not cost the allocation: the job goes on without it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cluster.hosts import Host, wait_until
from cluster.slurm import Cluster
from launchers import train
from rundir import distance, rows, summary
from runs import HERE, at_step, completed, edited, state, submit

pytestmark = pytest.mark.timeout(300)
full = pytest.mark.full

STEPS, EPOCH, HELD_OUT = 40, 29, 360  # the digits: 1,437 samples are 29 steps of 50
OPTIONS = ["--model", "paced:Slow", "--max-steps", str(STEPS), "--global-batch", "50", "--precision", "fp64",
           "--log-every", "1", "--save-every", "4"]  # fmt: skip
PACE = "0.3"


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Of one process: neither the order of samples nor the mathematics depends on the number of ranks."""
    run = tmp_path_factory.mktemp("wanted") / "run"
    result = train("python", 1, *OPTIONS, "--run-dir", str(run), cwd=HERE)
    assert result.code == 0, result.text[-3000:]
    return state(run)


def die(node: Host) -> None:
    """Its processes and its daemon are killed, and no one can reach it."""
    node.kill()
    node.kill_slurmd()
    node.cut()


def check_once(run: Path, *, worlds: list[int]) -> None:
    """Lines after a resume supersede earlier ones: then each step was done once, each sample evaluated once."""
    assert [start["world_size"] for start in rows(run, "start")] == worlds
    steps, evaluations = [], {}
    for row in rows(run, "train", "resume", "eval"):
        if row["kind"] == "resume":
            assert steps[-1] - row["step"] < 4, "more is lost than since the newest checkpoint"
            steps = [step for step in steps if step <= row["step"]]
            evaluations = {step: number for step, number in evaluations.items() if step <= row["step"]}
        elif row["kind"] == "train":
            steps.append(row["step"])
        else:
            assert row["step"] not in evaluations
            evaluations[row["step"]] = row["num_samples"]
    assert steps == list(range(1, STEPS + 1))
    assert evaluations == {EPOCH: HELD_OUT, STEPS: HELD_OUT}


@pytest.mark.parametrize(
    ("backend", "how", "timeout"),
    [
        ("ddp", die, 10),
        pytest.param("horovod", die, 10, marks=full),
        pytest.param("ddp", Host.crash, 10, marks=full),
        pytest.param("ddp", Host.crash, 60, marks=full),  # Slurm sees it first, and ends the step
        pytest.param("horovod", Host.crash, 60, marks=full),
    ],
)
def test_a_job_goes_on_without_a_lost_node(
    backend: str,
    how: Callable[[Host], None],
    timeout: int,
    cluster: Cluster,
    wanted: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    cluster.configure(SlurmdTimeout="15")  # after which Slurm takes the node from the job: 5 minutes by default
    options = [*OPTIONS, "--backend", backend, "--timeout", str(timeout)]
    job = submit(cluster, "train.sbatch", "-N3 --ntasks-per-node=1", *options, PACE=PACE)
    run = tmp_path / f"runs/job-{job.id}"
    at_step(job, run, 10)
    how(cluster.node("node3"))
    log = completed(job, 150)
    assert "lost a node: of node1 node2 node3 only node1 node2 answer, going on there (loss 1 of 3)" in log
    assert job.requeues == 0
    assert (summary(run)["status"], summary(run)["restart"]) == ("finished", 1)
    check_once(run, worlds=[3, 2])
    assert rows(run, "start")[1]["hosts"] == ["node1", "node2"]
    assert distance(state(run), wanted) <= 1e-12
    nodes = [cluster.node(name) for name in ("node1", "node2")]
    wait_until(lambda: not [node.name for node in nodes if node.pids()], "nothing is left running")


@full
def test_the_node_of_the_batch_script(cluster: Cluster, wanted: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Slurm leaves a --no-kill job that lost it without a script and without a step: another node requeues the job."""
    cluster.configure(SlurmdTimeout="10")
    script = edited("train.sbatch", tmp_path, ("sleep 60", "sleep 3"))
    job = submit(cluster, script, "-N3 --ntasks-per-node=1", *OPTIONS, "--timeout", "10", PACE=PACE)
    run = tmp_path / f"runs/job-{job.id}"
    at_step(job, run, 10)
    assert job.info()["BatchHost"] == "node1"
    node = cluster.node("node1")
    node.crash()
    job.until(lambda: job.requeues == 1, "go back into the queue", 60)
    node.boot()
    completed(job, 120)
    check_once(run, worlds=[3, 3])
    assert distance(state(run), wanted) <= 1e-12


@full
def test_losses_are_bounded(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """A second node is lost where one may be; the run has not finished, so the job has not either."""
    with Cluster.start(4, shared=[tmp_path_factory.getbasetemp()]) as cluster:
        cluster.folder = tmp_path
        cluster.configure(SlurmdTimeout="15")
        script = edited("train.sbatch", tmp_path, ("most_losses=3", "most_losses=1"))
        job = submit(cluster, script, "-N4 --ntasks-per-node=1", *OPTIONS, "--timeout", "10", PACE=PACE)
        run = tmp_path / f"runs/job-{job.id}"
        for name, step in (("node4", 6), ("node3", 20)):
            at_step(job, run, step)
            die(cluster.node(name))
        assert job.wait(120) == "FAILED"
        assert job.exit_code not in (0, 75)
        assert job.requeues == 0
        assert [start["world_size"] for start in rows(run, "start")] == [4, 3]
        assert job.log.count("going on there") == 1
        assert "(loss 1 of 1)" in job.log
        assert summary(run)["status"] == "failed"
