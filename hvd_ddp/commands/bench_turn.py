"""bench step: turns of the trainer, and of a loop by hand, over a backend that is set up."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_ddp.assemble import load_model
from hvd_ddp.backends.base import Backend
from hvd_ddp.config import TrainConfig
from hvd_ddp.data.arrays import ArrayDataset, Data
from hvd_ddp.data.sampler import GlobalBatchSampler
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.line import Line
from hvd_ddp.optim import build
from hvd_ddp.trainer import Trainer

WARM_UP = 20  # steps of a turn that do not count
FEW = 64  # samples that are evaluated at the end of a turn
NEVER = 1 << 30


class Clock:
    """Counts a model's forwards in training, and how long all but the first took."""

    def __init__(self, model: nn.Module) -> None:
        self.times: list[float] = []
        model.register_forward_pre_hook(lambda module, _: self.tick() if module.training else None)

    def tick(self) -> None:
        """A step begins."""
        self.times.append(time.perf_counter())

    def steps_per_second(self, steps: int, turn: int = 0) -> float:
        """In this turn of so many steps after the warm-up."""
        first = WARM_UP + turn * steps
        return steps / (self.times[first + steps] - self.times[first])


def on(turn: int) -> bool:
    """Whether the guards are on in this turn: on, off, off, on, so that a drift of the machine's speed is shared."""
    return turn % 4 in (0, 3)


class Turn:
    """Turns of so many steps. `line`: what the heartbeats go over."""

    def __init__(self, config: TrainConfig, data: Data, backend: Backend, line: Line, *, steps: int) -> None:
        self.config = replace(config, max_steps=WARM_UP + steps + 1, eval_every=NEVER, save_every=NEVER)
        self.data, self.backend, self.line, self.steps = few_to_evaluate(data), backend, line, steps

    def ours(self) -> float:
        """Steps a second of the trainer, as `train` runs it."""
        model, optimizer, clock = self._start()
        with contextlib.redirect_stdout(io.StringIO()):
            Trainer(self.config, model, optimizer, self.data, self.backend).fit()
        return clock.steps_per_second(self.steps)

    def guards(self, repeats: int) -> tuple[list[float], list[float]]:
        """Steps a second of as many turns with heartbeats, checks of the replicas and a save, and of as many without.

        All are turns of one training, so that memory lies where it lies in both.
        """
        beat, steps = self.line.on_beat, self.steps
        guarded = replace(self.config, max_steps=WARM_UP + 2 * repeats * steps + 1)
        saving, unguarded = replace(guarded, save_every=1), replace(guarded, check_replicas=0)
        model, optimizer, clock = self._start()
        trainer = Trainer(guarded, model, optimizer, self.data, self.backend)

        def switch() -> None:
            turn, step = divmod(max(trainer.step - WARM_UP, 0), steps)
            if on(turn):
                trainer.config, self.line.on_beat = saving if step == steps // 3 else guarded, beat
            else:
                trainer.config, self.line.on_beat = unguarded, lambda: None

        model.register_forward_pre_hook(lambda module, _: switch() if module.training else None)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                trainer.fit()
        finally:
            self.line.on_beat = beat
        speeds = [clock.steps_per_second(steps, turn) for turn in range(2 * repeats)]
        return (
            [speed for turn, speed in enumerate(speeds) if on(turn)],
            [speed for turn, speed in enumerate(speeds) if not on(turn)],
        )

    def bare(self, loop: Callable[..., None]) -> float:
        """Steps a second of a loop by hand, whose samples are numbers in memory already."""
        model, optimizer, clock = self._start()
        device, launch = self.backend.device, self.backend.launch
        inputs, targets = (tensor.to(device) for tensor in numbers(self.data))
        chosen = rows(self.config, len(inputs), rank=launch.rank, world_size=launch.world_size)
        loop(model.to(device), optimizer, chosen, inputs, targets)
        gc.collect()  # DDP's wrapper must not outlive its group
        return clock.steps_per_second(self.steps)

    def _start(self) -> tuple[nn.Module, Optimizer, Clock]:
        model = load_model(self.config, self.data, self.backend)
        return model, build(self.config, model), Clock(model)


def few_to_evaluate(data: Data) -> Data:
    """The same for training; what is evaluated is not measured. HvdDDPError where samples are not in memory."""
    if not isinstance(data.train, ArrayDataset) or not isinstance(data.eval, ArrayDataset):
        raise HvdDDPError(f"--data {data.name} is not in memory. Use a data set of arrays, such as digits.")
    return replace(data, eval=ArrayDataset(data.eval.images[:FEW], data.eval.targets[:FEW]))


def numbers(data: Data) -> tuple[Tensor, Tensor]:
    """All samples for training, as the model is shown them, float32 (N, ...), and their classes, int64 (N,)."""
    train = data.train
    assert isinstance(train, ArrayDataset)
    shape = (-1, *[1] * (len(data.image_shape) - 1))
    mean, std = (torch.tensor(values).view(shape) for values in (data.mean, data.std))
    return (torch.tensor(train.images, dtype=torch.float32) - mean) / std, torch.tensor(train.targets)


def rows(config: TrainConfig, num_samples: int, *, rank: int, world_size: int) -> Iterator[Tensor]:
    """The numbers of this rank's samples in each of `max_steps` steps, int64 (n,): those that the trainer takes."""
    steps = 0
    for epoch in itertools.count():
        sampler = GlobalBatchSampler(
            num_samples, config.global_batch, rank=rank, world_size=world_size, seed=config.seed, epoch=epoch
        )
        for indices, _ in sampler:
            yield torch.from_numpy(indices)
            steps += 1
            if steps == config.max_steps:
                return
