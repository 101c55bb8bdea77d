"""What each of the two ranks of test_prediction.py runs: what a step of each model costs alone, and how long it takes
with the other. Both ranks do the same at the same time, alone too: they share a machine."""

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ddp import connect
from hvd_ddp.backends.base import Backend
from hvd_ddp.commands.simulate_record import record
from hvd_ddp.models import build

WARM_UP, COUNTED = 2, 3
IMAGES = (1, 28, 28)


def linear(width: int) -> nn.Module:
    layers = [layer for _ in range(8) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    """The model, and its samples of a step."""
    torch.manual_seed(0)
    if name.startswith("linear"):
        width = int(name.removeprefix("linear"))
        return linear(width), torch.randn(64, width)
    return build(name, 10, IMAGES), torch.randn(32 if name == "convnet" else 1, *IMAGES)


def step_of(
    wrapped: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, ours: Backend | None
) -> Callable[[], None]:
    targets = torch.zeros(len(inputs), dtype=torch.long)

    def step() -> None:
        functional.cross_entropy(wrapped(inputs), targets).backward()
        if ours is None:
            optimizer.step()
        else:
            with ours.synchronize(optimizer):
                optimizer.step()
        optimizer.zero_grad()

    return step


def measured(name: str, ours: Backend) -> dict[str, object]:
    model, inputs = model_of(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ours.barrier()
    alone = step_of(model, optimizer, inputs, None)
    costs = record(model, alone, name=name, about="one rank of two", samples=len(inputs))
    wrapped, optimizer = ours.prepare(model, optimizer)
    step, times = step_of(wrapped, optimizer, inputs, ours), []
    for _ in range(WARM_UP + COUNTED):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    ours.barrier()
    return {"costs": costs.to_dict(), "seconds": times[WARM_UP:]}


def main() -> None:
    with connect("ddp", "gloo", "cpu", threads=1) as ours:
        found = {name: measured(name, ours) for name in sys.argv[1:]}
        if ours.is_main:
            print(f"measured {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
