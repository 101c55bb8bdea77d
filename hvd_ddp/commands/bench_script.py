"""bench start: the script that one writes by hand for the training of `python -m hvd_ddp`, with what it needs alone.

`python -m hvd_ddp.commands.bench_script ddp|horovod STEPS STORE`, on ranks of mpirun or torchrun; STORE is a file in
which DDP's ranks find each other. It takes nothing from the rest of the package but the loop and the file of digits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn, optim

from hvd_ddp.commands import bench_bare

DIGITS = Path(__file__).parents[1] / "data/digits.npz"
GLOBAL_BATCH = 64


def main(backend: str, steps: int, store: str) -> None:
    """Train that many steps of the first epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.load(DIGITS) as arrays:
        images, targets = torch.tensor(arrays["train_images"]).float(), torch.tensor(arrays["train_targets"])
    inputs = (images - images.mean()) / images.std()
    model = nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(128 * 8 * 8, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    if backend == "ddp":
        launcher = "OMPI_COMM_" if "OMPI_COMM_WORLD_SIZE" in os.environ else ""
        rank = int(os.environ["OMPI_COMM_WORLD_RANK" if launcher else "RANK"])
        size = int(os.environ[f"{launcher}WORLD_SIZE"])
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        bench_bare.ddp(model, optimizer, rows(len(inputs), steps, rank, size), inputs, targets)
        torch.distributed.destroy_process_group()
    else:
        import horovod.torch as hvd

        hvd.init()
        bench_bare.horovod(model, optimizer, rows(len(inputs), steps, hvd.rank(), hvd.size()), inputs, targets)


def rows(num_samples: int, steps: int, rank: int, size: int) -> Iterator[Tensor]:
    """The numbers of this rank's samples; rank 0 tells of each step that is done."""
    order = torch.randperm(num_samples)
    for step in range(steps):
        yield order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH][rank::size]
        if rank == 0:
            print(f"step {step + 1}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
