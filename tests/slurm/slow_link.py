"""What each rank of test_slow_link.py runs: steps a second of ResNet-18 with each compression, in turn."""

import json
import sys
import time

import torch
from torch.nn import functional

from hvd_ddp import Communication, connect
from hvd_ddp.backends.compression import START
from hvd_ddp.models import build

COUNTED = 4


def speed(backend: str, transport: str, compression: str) -> float:
    """Steps a second, one sample a rank and step, after those that PowerSGD averages in full."""
    # One bucket: where MPI's messages over TCP are short, those of the other direction wait for them, or do not.
    fusion_mb = 64.0 if backend == "horovod" else None
    communication = Communication(compression=compression, fusion_mb=fusion_mb)
    with connect(backend, transport, "cpu", threads=1, communication=communication) as ours:
        torch.manual_seed(0)
        model = build("resnet18", 10, (1, 28, 28))
        wrapped, optimizer = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        inputs, targets = torch.randn(1, 1, 28, 28), torch.tensor([ours.launch.rank])
        warm_up = START + 1 if compression == "powersgd" else 2
        for step in range(warm_up + COUNTED):
            if step == warm_up:
                ours.barrier()
                began = time.perf_counter()
            functional.cross_entropy(wrapped(inputs), targets).backward()
            with ours.synchronize(optimizer):
                optimizer.step()
            optimizer.zero_grad()
        ours.barrier()
        return COUNTED / (time.perf_counter() - began)


def main() -> None:
    backend, transport, repeats, *names = sys.argv[1:]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(int(repeats)):
        for name in names if number % 2 else names[::-1]:
            speeds[name].append(speed(backend, transport, name))
    print(f"speeds {json.dumps(speeds)}", flush=True)


if __name__ == "__main__":
    main()
