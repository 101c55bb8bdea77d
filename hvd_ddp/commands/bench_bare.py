"""The loops that bench step compares with: what one writes by hand who uses DDP or Horovod alone.

They take nothing from the rest of the package. `rows` gives the indices of this rank's samples, step after step, as
int64 tensors; `inputs` float32 (N, ...) and `targets` int64 (N,) are in memory, on the model's device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def ddp(model: nn.Module, optimizer: Optimizer, rows: Iterable[Tensor], inputs: Tensor, targets: Tensor) -> None:
    """With torch.distributed set up."""
    device_ids = [inputs.device.index] if inputs.device.type == "cuda" else None
    wrapped: Any = DistributedDataParallel(model, device_ids=device_ids)
    for indices in rows:
        optimizer.zero_grad()
        loss = functional.cross_entropy(wrapped(inputs[indices]), targets[indices])
        loss.backward()
        optimizer.step()


def horovod(model: nn.Module, optimizer: Optimizer, rows: Iterable[Tensor], inputs: Tensor, targets: Tensor) -> None:
    """With Horovod set up."""
    import horovod.torch as hvd

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for indices in rows:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs[indices]), targets[indices])
        loss.backward()
        optimizer.step()
