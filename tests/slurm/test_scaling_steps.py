"""scaling on one host and then two: from Slurm's batch shell, each a step of srun, and by mpirun with a hostfile."""

import csv
import sys
from pathlib import Path

import pytest
from cluster.slurm import Cluster
from runs import QUIET, completed

pytestmark = pytest.mark.timeout(400)


SCALING = f"{sys.executable} -m hvd_ddp scaling --model factories:Small --steps 10 --repeats 1 --threads 1"


def measured(folder: Path, log: str) -> list[tuple[str, str, str, str]]:
    """What scaling.csv says of backend, transport, ranks and hosts; each cell must have a throughput."""
    with (folder / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["samples_per_second"]) > 0 for row in rows), log
    return [(row["backend"], row["transport"], row["ranks"], row["hosts"]) for row in rows]


def test_steps_of_srun(two: Cluster, tmp_path: Path) -> None:
    job = two.sbatch(f"{SCALING} --backend ddp", "-N2", "--ntasks-per-node=1", cwd=tmp_path, **QUIET)
    log = completed(job, 300)
    assert measured(tmp_path, log) == [("ddp", "gloo", "1", "1"), ("ddp", "gloo", "2", "2")]
    assert (tmp_path / "scaling.svg").exists()
    assert not [node.name for node in two.nodes if node.pids()]


def test_mpirun_with_a_hostfile(two: Cluster, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    words = [*SCALING.split(), "--backend", "horovod", "--hostfile", "hosts"]
    result = two.run(*words, host="node1", cwd=tmp_path, timeout=300, **QUIET)
    assert result.code == 0, result.text
    assert measured(tmp_path, result.text) == [("horovod", "mpi", "1", "1"), ("horovod", "mpi", "2", "2")]
