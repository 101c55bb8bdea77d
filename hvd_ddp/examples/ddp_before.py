"""A DDP script as there are many, for comparison with ddp_after.py. Nothing of hvd_ddp is in it.

torchrun --nproc-per-node 2 -m hvd_ddp.examples.ddp_before
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 2


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    points = torch.randn(512, 10)
    data = TensorDataset(points, (points @ torch.randn(10, 3)).argmax(1))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)))
    optimizer = optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader, 1):
            last = number % ACCUMULATE == 0
            with nullcontext() if last else model.no_sync():
                loss = functional.cross_entropy(model(inputs), targets)
                (loss / ACCUMULATE).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean.item():.6f}", flush=True)

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
