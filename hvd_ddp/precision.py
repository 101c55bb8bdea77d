"""In which numbers to compute: dtype of parameters, autocast, loss scaling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_ddp.errors import HvdDDPError

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """fp64 and fp32 throughout, or parameters in fp32 with bf16 or fp16 autocast; fp16 scales the loss.

    Raises HvdDDPError where the device can't compute in that dtype.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.dtype = torch.float64 if name == "fp64" else torch.float32
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")
        self._probe()

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of every forward."""
        dtype = AUTOCAST.get(self.name)
        return torch.autocast(self.device.type, dtype) if dtype else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Gradients of the scaled loss."""
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the averaged gradients by the scale: clipping comes after."""
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> int:
        """1 if the optimizer stepped; 0 if a scaled gradient overflowed, on whatever rank: all skip, same scale."""
        if not self.scaler.is_enabled():
            optimizer.step()
            return 1
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return int(self.scaler.get_scale() >= before)

    def _probe(self) -> None:
        try:
            layer = nn.Conv2d(1, 1, 3).to(self.device, self.dtype)
            with self.autocast():
                outputs = layer(torch.ones(1, 1, 8, 8, device=self.device, dtype=self.dtype))
            self.scaler.scale(outputs.float().sum()).backward()
        except RuntimeError as error:
            raise HvdDDPError(
                f"--precision {self.name} can't work on `{self.device.type}` with torch `{torch.__version__}`: "
                f"{' '.join(str(error).split())[:200]} Use --precision bf16 or fp32."
            ) from error
