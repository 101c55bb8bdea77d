"""Every template on several hosts ends with the numbers of torchrun on one host, and every rank knows its place."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cluster.slurm import Cluster
from launchers import train
from rundir import different, distance, rows, summary
from runs import HERE, completed, edited, state, submit

pytestmark = pytest.mark.timeout(300)

OPTIONS = ["--max-steps", "12", "--global-batch", "50", "--clip-norm", "0.5", "--optimizer", "adamw",
           "--weight-decay", "0.1", "--accumulate", "2", "--save-every", "5", "--log-every", "4"]  # fmt: skip
ONE_A_NODE = "-N2 --ntasks-per-node=1"
full = pytest.mark.full

# (template, options, SLURM_MPI_TYPE of sbatch, which stands for srun --mpi): what must have been chosen
CELLS = {
    ("train", "--backend ddp", ""): ("srun", "ddp", "gloo"),
    ("train", "--backend horovod", ""): ("srun", "horovod", "gloo"),
    ("train", "--backend horovod --transport mpi", "pmix"): ("srun", "horovod", "mpi"),
    ("train", "--backend ddp", "pmix"): ("srun", "ddp", "gloo"),
    ("train", "--backend ddp --transport mpi", "pmix"): ("srun", "ddp", "mpi"),
    ("torchrun", "--backend ddp", ""): ("torchrun", "ddp", "gloo"),
    ("torchrun", "--backend horovod", ""): ("torchrun", "horovod", "gloo"),
    ("mpirun", "--backend ddp", ""): ("openmpi", "ddp", "mpi"),
    ("mpirun", "--backend horovod", ""): ("openmpi", "horovod", "mpi"),
    ("horovodrun", "--backend horovod", ""): ("horovodrun", "horovod", "gloo"),
    ("horovodrun", "--backend ddp", ""): ("horovodrun", "ddp", "gloo"),
}
ALWAYS = [("train", "--backend ddp", ""), ("train", "--backend horovod --transport mpi", "pmix"),
          ("train", "--backend ddp --transport mpi", "pmix"),
          ("torchrun", "--backend ddp", ""), ("mpirun", "--backend horovod", ""),
          ("horovodrun", "--backend horovod", "")]  # fmt: skip


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Of torchrun on one host, two ranks."""
    run = tmp_path_factory.mktemp("wanted") / "run"
    result = train("torchrun", 2, *OPTIONS, "--run-dir", str(run))
    assert result.code == 0, result.text[-3000:]
    return state(run)


@pytest.mark.parametrize(
    ("template", "options", "mpi"), [cell if cell in ALWAYS else pytest.param(*cell, marks=full) for cell in CELLS]
)
def test_two_ranks_on_two_hosts_end_with_the_bits_of_one_host(
    template: str, options: str, mpi: str, two: Cluster, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    two.folder = tmp_path
    env = {"SLURM_MPI_TYPE": mpi} if mpi else {}
    job = submit(two, f"{template}.sbatch", ONE_A_NODE, *OPTIONS, *options.split(), **env)
    log = completed(job, 150)
    run = tmp_path / f"runs/job-{job.id}"
    found = summary(run)
    assert (found["launcher"], found["backend"], found["transport"]) == CELLS[template, options, mpi], log
    assert (found["status"], found["world_size"], found["job"]) == ("finished", 2, job.id)
    assert rows(run, "start")[0]["hosts"] == ["node1", "node2"]
    assert different(state(run), wanted) == []
    assert log.count("finished: ") == 1
    assert not list(tmp_path.glob("**/.rendezvous*")), "left behind by the rendezvous"
    assert not [node.name for node in two.nodes if node.pids()]


CLOSE = {
    "fp64": (1e-12, ["--max-steps", "30", "--global-batch", "50", "--precision", "fp64", "--clip-norm", "0.5"]),
    "fp32": (1e-5, ["--max-steps", "30", "--global-batch", "50", "--optimizer", "sgd", "--lr", "0.01"]),
}
PLACES = {  # options of sbatch: the (node, local rank) of each rank, and how many are on each node
    "-N2 -n3": [(1, 0), (1, 1), (2, 0)],
    "-N2 -n3 -m cyclic": [(1, 0), (2, 0), (1, 1)],
    "-N2 --ntasks-per-node=2": [(1, 0), (1, 1), (2, 0), (2, 1)],
    "-N2 --ntasks-per-node=2 -m cyclic": [(1, 0), (2, 0), (1, 1), (2, 1)],
    "-N2 -n4 -m cyclic": [(1, 0), (2, 0), (1, 1), (1, 2)],  # Slurm fills the first node but for one task
}
PLACED = ("train", "horovod", "-N2 -n3 -m cyclic", "fp64")
EVERYWHERE = [
    *itertools.product(["train"], ["ddp", "horovod"], PLACES, ["fp64"]),
    *itertools.product(["train"], ["ddp", "horovod"], ["-N2 -n3", "-N2 --ntasks-per-node=2"], ["fp32"]),
]
OTHERS = [
    (*template, options, "fp64")
    for template in [("torchrun", "ddp"), ("mpirun", "horovod"), ("horovodrun", "horovod")]
    for options in ("-N2 -n3", "-N2 --ntasks-per-node=2")
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, torch.Tensor]]:
    """Of one process, in that precision."""

    @functools.cache
    def of(precision: str) -> dict[str, torch.Tensor]:
        run = tmp_path_factory.mktemp("alone") / "run"
        result = train("python", 1, *CLOSE[precision][1], "--run-dir", str(run))
        assert result.code == 0, result.text[-3000:]
        return state(run)

    return of


@pytest.mark.parametrize(
    ("template", "backend", "options", "precision"),
    [PLACED, *[pytest.param(*cell, marks=full) for cell in [*EVERYWHERE, *OTHERS] if cell != PLACED]],
)
def test_three_and_four_ranks_know_their_place_and_compute_the_same(
    template: str,
    backend: str,
    options: str,
    precision: str,
    two: Cluster,
    alone: Callable[[str], dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    two.folder = tmp_path
    script = edited(f"{template}.sbatch", tmp_path, ("-m hvd_ddp train", f"{HERE / 'placed.py'} train"))
    limit, training = CLOSE[precision]
    job = submit(two, script, options, *training, "--backend", backend, PLACES=str(tmp_path))
    log = completed(job, 200)
    check_places(tmp_path, PLACES[options] if template in ("train", "torchrun") else None, len(PLACES[options]))
    run = tmp_path / f"runs/job-{job.id}"
    assert summary(run)["world_size"] == len(PLACES[options]), log
    assert distance(state(run), alone(precision)) <= limit


def check_places(folder: Path, wanted: list[tuple[int, int]] | None, world_size: int) -> None:
    """Every rank knows the same hosts, its node, its number there; on each node there is one with the number 0."""
    places = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    if wanted is not None:
        assert [(int(place["real_host"][4:]), place["local_rank"]) for place in places] == wanted
    hosts = [place["real_host"] for place in places]
    for rank, place in enumerate(places):
        assert (place["rank"], place["world_size"]) == (rank, world_size)
        assert place["hosts"] == hosts
        assert place["local_world_size"] == hosts.count(hosts[rank])
    nodes = {place["real_host"]: place["node_rank"] for place in places}
    assert sorted(nodes.values()) == [0, 1]
    assert all(nodes[place["real_host"]] == place["node_rank"] for place in places)
    assert sorted(place["real_host"] for place in places if place["local_rank"] == 0) == ["node1", "node2"]
