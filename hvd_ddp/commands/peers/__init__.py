"""bench peers: the same training in other libraries, a small file each, as that library's own documentation teaches it.

A file has one function, `train(job)`, and is imported on ranks of its own. Models of torch tick the job's clock
themselves when they are called; a library with a model of its own ticks before each step, and in the end puts its
weights into the job's model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_ddp.commands.bench_turn import Clock
from hvd_ddp.config import TrainConfig
from hvd_ddp.data.arrays import Data
from hvd_ddp.job.launch import Launch


class Peer(NamedTuple):
    """Who is measured: what the table calls it, and the modules and packages of pip without which it is missing."""

    name: str
    needs: dict[str, str]
    by_mpirun: bool = False  # is how its ranks are started


# By the file's name.
PEERS = {
    "ours": Peer("hvd_ddp", {}),
    "ours_over_mpi": Peer("hvd_ddp over MPI", {"mpi4py": "mpi4py"}, by_mpirun=True),
    "by_hand": Peer("DDP by hand", {}),
    "fabric": Peer("Fabric", {"lightning": "lightning"}),
    "lightning": Peer("Lightning", {"lightning": "lightning"}),
    "accelerate": Peer("accelerate", {"accelerate": "accelerate"}),
    "ignite": Peer("ignite", {"ignite": "pytorch-ignite"}),
    "tensorflow": Peer("tf.distribute", {"tensorflow": "tensorflow-cpu"}),
    "jax": Peer("JAX", {"jax": "jax", "optax": "optax"}),
}


@dataclass(frozen=True)
class Job:
    """What each is given on each rank, which torch's elastic launcher has started, or mpirun.

    `model` has its first weights and `optimizer` is SGD of its parameters; `inputs` float32 (N, C, H, W), normalised,
    and `targets` int64 (N,) are in memory; `rows` are the numbers of this rank's samples, int64 (n,), a tensor a step.
    """

    config: TrainConfig
    data: Data
    launch: Launch
    model: nn.Module
    optimizer: Optimizer
    clock: Clock
    rows: list[Tensor]
    inputs: Tensor
    targets: Tensor
    folder: Path  # empty, of this job
    ports: list[int]  # of this host, free, one a rank: for libraries that want to be told


class Batches:
    """The job's batches for libraries that go over a loader themselves."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __len__(self) -> int:
        return len(self._job.rows)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((self._job.inputs[rows], self._job.targets[rows]) for rows in self._job.rows)
