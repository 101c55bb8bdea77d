"""Models for --model slow_models:NAME that take their time, so that a test can act meanwhile."""

import os
import time
from pathlib import Path

import torch
from factories import Small

from hvd_ddp.job.launch import detect


class Slow(Small):
    """A fifth of a second a step; from the fifth on there is a file `steps`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        time.sleep(0.2)
        if self.forwards == 5:
            Path("steps").touch()
        return out


class SkipsOne(Small):
    """At its fifth forward all ranks but that of FAULT=skip@R meet in a group of the user's own."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        import torch.distributed as dist

        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.forwards == 5:
            if detect().rank == int(os.environ["FAULT"].partition("@")[2]):
                Path("fault").write_text(str(time.time()))
            else:
                self.meet()
        return out

    def meet(self) -> None:
        if self.group is None:
            import horovod.torch as hvd

            hvd.allreduce(torch.ones(1), name="mine")
        else:
            import torch.distributed as dist

            dist.all_reduce(torch.ones(1), group=self.group)
