"""Models for --model factories:NAME, each with one fault."""

import torch
from torch import nn

from hvd_ddp.job.launch import detect


class Small(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, num_classes)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return self.layer(x.flatten(1))


class Raises(Small):
    """Rank 1's fifth forward fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if detect().rank == 1 and self.forwards == 4:
            raise RuntimeError("the sensor is on fire")
        return super().forward(x)


class RaisesOnMain(Small):
    """Rank 0's fifth forward fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if detect().rank == 0 and self.forwards == 4:
            raise RuntimeError("the sensor is on fire")
        return super().forward(x)


class UnusedOnOneRank(Small):
    """Rank 1 does not use `extra`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.extra = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        return out if detect().rank == 1 else out + self.extra(x.flatten(1))


class UnusedOnAll(Small):
    """Nobody uses `extra`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.extra = nn.Linear(64, num_classes)
