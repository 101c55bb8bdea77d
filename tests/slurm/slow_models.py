"""Models for --model slow_models:NAME: one that takes its time, one that skips a collective, one that looks around."""

import json
import os
import time
from pathlib import Path

import psutil
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


class Shows(Small):
    """At its fifth forward each rank writes down what libraries were told, and from where to where it is connected."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forwards == 4:
            pairs = [(line.laddr.ip, line.raddr.ip) for line in psutil.Process().net_connections("inet") if line.raddr]
            seen = {"environ": dict(os.environ), "connections": [[_plain(end) for end in pair] for pair in pairs]}
            Path(f"shows-{detect().rank}.json").write_text(json.dumps(seen))
        return super().forward(x)


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:")
