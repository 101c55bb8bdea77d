"""Models for --model factories:NAME, each with one fault."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvd_ddp.data.loader import ArrayLoader
from hvd_ddp.job.launch import detect
from hvd_ddp.job.pulse import Pulse


class Small(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, num_classes)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return self.layer(x.flatten(1))


class RaisesEarly(Small):
    """Rank 1 can't build it, before there is a run directory."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        if detect().rank == 1:
            raise RuntimeError("the sensor is on fire")


class SlowToBuild(Small):
    """Rank 0 takes eleven seconds, as it may for data that it prepares."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        if detect().rank == 0:
            time.sleep(11.0)


class Slow(Small):
    """As slow as the environment says, in seconds: BUILD on rank 0, FORWARD, and EVALUATE for every 20 samples.

    Leaves a file named `building` or `evaluating` when it begins with that.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        if detect().rank == 0 and "BUILD" in os.environ:
            Path("building").touch()
            time.sleep(float(os.environ["BUILD"]))
        ArrayLoader.evaluation_batches.__kwdefaults__["batch_size"] = 20  # else a rank has one batch, which none cuts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and "EVALUATE" in os.environ:
            Path("evaluating").touch()
        time.sleep(float(os.environ.get("FORWARD" if self.training else "EVALUATE", "0")))
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


class Faulty(Small):
    """At its fifth forward rank R does what FAULT=what@R says; an odd last batch or an evaluation comes later."""

    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        what, _, rank = os.environ["FAULT"].partition("@")
        if self.forwards == 4:
            mine = detect().rank == int(rank)
            if mine:
                Path("fault").write_text(str(time.time()))
            if what == "skip":
                if not mine:
                    all_reduce(torch.ones(1))
            elif mine:
                getattr(self, what)()
        scale, self.scale = self.scale, 1.0
        return super().forward(x) * scale

    def throw(self) -> None:
        raise RuntimeError("the sensor is on fire")

    def nan(self) -> None:
        """In this one forward."""
        self.scale = float("nan")

    def leave(self) -> None:
        sys.exit(0)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def halt(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def pause(self) -> None:
        """Stopped for less than the timeout."""
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        self.halt()

    def hang(self) -> None:
        while True:
            time.sleep(60)


class StopsIn(Small):
    """With FAULT=phase@R rank R is stopped in that phase, after its fourth step and a beat that has told of it."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        phase, _, rank = os.environ["FAULT"].partition("@")
        come_to = Pulse._come_to

        def then_stop(pulse: Pulse, where: str) -> None:
            come_to(pulse, where)
            if where == phase and pulse.step >= 4 and not Path("fault").exists():
                time.sleep(1.5)  # more than a beat
                Path("fault").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGSTOP)

        if detect().rank == int(rank):
            Pulse._come_to = then_stop


def all_reduce(tensor: torch.Tensor) -> None:
    """As a user's own model would."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.all_reduce(tensor)
    else:
        import horovod.torch as hvd

        hvd.allreduce(tensor, name="mine")


class Wide(nn.Module):
    """A state of 4 MB under adamw, so that a save takes as long as some steps; it draws all kinds of random numbers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 4000), nn.Dropout(0.1), nn.Linear(4000, num_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
            x = x * (1 + 0.01 * np.random.standard_normal()) + 0.01 * random.random()
        return self.layers(x)


class Disturbed(Wide):
    """Before its nth step in this process it does what the test has put into `at`[n]."""

    at: ClassVar[dict[int, Callable[[], object]]] = {}

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.num_steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_steps += 1
            self.at.get(self.num_steps, lambda: None)()
        return super().forward(x)


def under_horovod() -> bool:
    """Once it has met over Gloo: that is what the backend tells it by."""
    return "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ


class OtherUnderHorovod(Small):
    """From its fourth training step on a little louder there; or it raises, if the environment has RAISE."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        there = under_horovod() and self.training and self.forwards >= 3
        if there and "RAISE" in os.environ:
            raise RuntimeError("the sensor is on fire")
        return super().forward(x * (1 + 1e-9) if there else x)


class Random(Small):
    """Dropout that no module tells of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


def other_order_under_horovod(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Two samples have changed places."""
    inputs, targets = torch.rand(100, 64, generator=torch.Generator().manual_seed(1)), torch.arange(100) % 10
    order = [1, 0, *range(2, 100)] if under_horovod() else list(range(100))
    data = TensorDataset(inputs[order], targets[order])
    return data, data


class Keeps(Small):
    """Has something in its state that no checkpoint can hold."""

    def get_extra_state(self) -> dict[str, object]:
        return {"where": Path("x")}

    def set_extra_state(self, state: dict[str, object]) -> None:
        pass


class KeepsLater(Keeps):
    """Only after some steps."""

    def get_extra_state(self) -> dict[str, object]:
        return {"last": np.float64(0.5) if self.forwards > 2 else 0.5}
