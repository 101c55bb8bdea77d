"""A Horovod script as there are many, for comparison with horovod_after.py. Nothing of hvd_ddp is in it.

horovodrun -np 2 python -m hvd_ddp.examples.horovod_before
"""

from typing import Any

import horovod.torch as hvd
import torch
from torch import nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    hvd.init()
    torch.manual_seed(0)
    points = torch.randn(512, 10)
    data = TensorDataset(points, (points @ torch.randn(10, 3)).argmax(1))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = hvd.DistributedOptimizer(
        optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.6f}", flush=True)

    if hvd.rank() == 0:
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
