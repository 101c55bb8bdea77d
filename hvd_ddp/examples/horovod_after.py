"""horovod_before.py with hvd_ddp: the same training, to the same weights, and no longer under Horovod alone.

horovodrun -np 2 python -m hvd_ddp.examples.horovod_after
torchrun --nproc-per-node 2 -m hvd_ddp.examples.horovod_after
srun -n 2 python -m hvd_ddp.examples.horovod_after
"""

from typing import Any

import torch
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hvd_ddp import Backend, connect


def main(backend: Backend) -> None:
    rank, world_size = backend.launch.rank, backend.launch.world_size
    torch.manual_seed(0)
    points = torch.randn(512, 10)
    data = TensorDataset(points, (points @ torch.randn(10, 3)).argmax(1))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    wrapped, optimizer = backend.prepare(model, optim.SGD(model.parameters(), lr=0.05 * world_size, momentum=0.9))

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(wrapped(inputs), targets)
            loss.backward()
            with backend.synchronize(optimizer):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        mean = backend.all_reduce(loss.detach()) / world_size
        if backend.is_main:
            print(f"epoch {epoch}: loss {mean.item():.6f}", flush=True)

    if backend.is_main:
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    with connect() as backend:
        main(backend)
