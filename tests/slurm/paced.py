"""Models for --model paced:NAME."""

import os
import time

import torch
from torch import nn


class Slow(nn.Module):
    """A linear layer whose training forward takes PACE: seconds in the first start of the job, in the second, ..."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, num_classes)
        paces = [float(word) for word in os.environ.get("PACE", "0").split(",")]
        self.pace = paces[min(int(os.environ.get("SLURM_RESTART_COUNT", "0")), len(paces) - 1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.pace)
        return self.layer(x.flatten(1))


class Broken(nn.Module):
    """Can't be built."""

    def __init__(self, num_classes: int) -> None:
        raise RuntimeError("no such sensor")
