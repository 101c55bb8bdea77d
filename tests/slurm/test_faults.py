"""On two hosts under Slurm: a rank that fails, by whatever fault, ends the job in time, and the log names it."""

import time
from pathlib import Path

import pytest
from cluster.slurm import Cluster
from rundir import summary
from two_nodes import MESSAGE, SLACK, cluster_for, ends, nothing_left, said, submit, the_record

TIMEOUT, PROMISED = 8, 10  # seconds: of --timeout here, and what may come on top

# What the rank does in its fifth forward -> what is said of it.
SAID = {
    "throw": ("failed", "RuntimeError: the sensor is on fire"),
    "die": ("last seen", "its process is gone without a word"),
    "halt": ("last seen", "it has been silent for"),
    "hang": ("failed", "it has stood still for"),
    "skip": ("failed", "it has stood still for"),
}
OFTEN = [
    ("ddp", "throw@1"),
    ("ddp", "die@0"),
    ("ddp", "halt@1"),
    ("horovod", "hang@0"),
    ("horovod", "halt@0"),
    ("horovod", "die@1"),
]
ALL = [(backend, f"{fault}@{rank}") for backend in ("ddp", "horovod") for fault in SAID for rank in (0, 1)]


def cells(often: list[tuple[str, str]], every: list[tuple[str, str]]) -> list[object]:
    return [pytest.param(*cell, marks=[] if cell in often else pytest.mark.full) for cell in every]


def check_fault(two: Cluster, backend: str, fault: str, tmp_path: Path, tasks: int = 1) -> None:
    what, _, rank = fault.partition("@")
    model = "slow_models:SkipsOne" if what == "skip" else "factories:Faulty"
    job = submit(two, tmp_path, "--backend", backend, "--model", model, "--max-steps", "12",
                 "--timeout", str(TIMEOUT), tasks=tasks, FAULT=fault)  # fmt: skip
    job.until((tmp_path / "fault").exists, "come to its fault", 60)
    state = ends(job, 60)
    took = time.time() - float((tmp_path / "fault").read_text())
    assert took < TIMEOUT + PROMISED + SLACK, job.log
    assert state == "FAILED"
    number, host, how, phase, step, words = said(job.log)
    if what == "skip" and tasks == 1:  # each waits for the other: which is at fault nobody can know, so both are told
        rank = number
        assert f"rank {1 - int(rank)} on node{2 - int(rank)} in " in words
    assert (number, host, how) == (rank, f"node{int(rank) // tasks + 1}", SAID[what][0])
    assert words.startswith(SAID[what][1])
    record = the_record(tmp_path)
    assert (record["rank"], record["host"]) == (int(rank), host)
    assert (record["phase"], record["step"], record["exception"]) == (phase, int(step), words)
    assert summary(tmp_path / "run")["status"] == "failed"
    nothing_left(two)


@pytest.mark.parametrize(("backend", "fault"), cells(OFTEN, ALL))
def test_a_fault_ends_the_job(two: Cluster, backend: str, fault: str, tmp_path: Path) -> None:
    check_fault(two, backend, fault, tmp_path)


@pytest.mark.parametrize(
    ("backend", "rank"),
    [
        ("ddp", 0),
        pytest.param("ddp", 1, marks=pytest.mark.full),
        pytest.param("horovod", 0, marks=pytest.mark.full),
        pytest.param("horovod", 1, marks=pytest.mark.full),
    ],
)
def test_a_pause_is_survived(two: Cluster, backend: str, rank: int, tmp_path: Path) -> None:
    """Stopped for four of the eight seconds."""
    job = submit(two, tmp_path, "--backend", backend, "--model", "factories:Faulty", "--max-steps", "12",
                 "--timeout", str(TIMEOUT), FAULT=f"pause@{rank}")  # fmt: skip
    assert ends(job, 90) == "COMPLETED", job.log
    assert job.exit_code == 0
    assert time.time() - float((tmp_path / "fault").read_text()) > 4, "else it tests nothing"
    assert "hvd_ddp: " not in job.log
    assert summary(tmp_path / "run")["status"] == "finished"
    assert not (tmp_path / "run/failures").exists()


@pytest.mark.full
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
@pytest.mark.parametrize("fault", ["throw@2", "die@3", "halt@1", "hang@2", "skip@3"])
def test_a_fault_of_one_of_four(two: Cluster, backend: str, fault: str, tmp_path: Path) -> None:
    """Two ranks a node: the others of its node are not taken for it."""
    check_fault(two, backend, fault, tmp_path, tasks=2)


@pytest.mark.parametrize(
    ("backend", "cut", "tasks"),
    [
        ("ddp", 2, 2),
        pytest.param("ddp", 1, 1, marks=pytest.mark.full),
        pytest.param("ddp", 1, 2, marks=pytest.mark.full),
        pytest.param("ddp", 2, 1, marks=pytest.mark.full),
        pytest.param("horovod", 2, 1, marks=pytest.mark.full),
        pytest.param("horovod", 1, 1, marks=pytest.mark.full),
        pytest.param("horovod", 1, 2, marks=pytest.mark.full),
    ],
)
def test_a_cut_link_ends_the_job(
    backend: str, cut: int, tasks: int, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """A rank of the node that is cut off is named, wherever the judge is, and those that are left go by themselves."""
    with cluster_for(tmp_path_factory) as cluster:
        lost, other = (cluster.nodes[index] for index in (cut - 1, 2 - cut))
        job = submit(cluster, tmp_path, "--backend", backend, "--model", "slow_models:Slow", "--max-steps", "500",
                     "--timeout", str(TIMEOUT), tasks=tasks)  # fmt: skip
        job.until((tmp_path / "steps").exists, "train", 60)
        began = time.time()
        lost.cut()
        if cut == 2:
            assert ends(job, 60, lost_node=True) in {"FAILED", "COMPLETING"}, job.log
            took = time.time() - began
            nothing_left(cluster, other.name)
        else:  # the batch script, and so what Slurm knows of the job, is behind the cut
            nothing_left(cluster, other.name, within=60)
            took = time.time() - began
        assert took < TIMEOUT + PROMISED + SLACK, job.log
        if cut == 1:
            lost.mend()
            assert ends(job, 60) == "FAILED"
        ranks = range((cut - 1) * tasks, cut * tasks)
        found = said(job.log, several=True)
        assert (int(found[0]), found[1]) in {(rank, lost.name) for rank in ranks}
        record = the_record(tmp_path)
        assert record["host"] == lost.name
        assert record["rank"] in ranks
        assert summary(tmp_path / "run")["status"] == "failed"
        assert {host for _, host, *_ in MESSAGE.findall(job.log)} == {lost.name}, "each side says that it is this one"
