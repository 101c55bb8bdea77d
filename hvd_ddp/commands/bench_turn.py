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

    def steps_per_second(self, steps: int) -> float:
        """In so many steps after the warm-up."""
        return steps / (self.times[WARM_UP + steps] - self.times[WARM_UP])


class Blocks:
    """When the guards of a training are on, whose pairs have so many `steps` with them and as many without.

    Blocks of some fifty steps go on, off, off, on: a drift of the machine's speed is shared within a second or two.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._num = steps, max(1, steps // 50)

    def on(self, step: int) -> bool:
        """Whether they are in this step, from 0."""
        return self._block(step) % 4 in (0, 3)

    def saves(self, step: int) -> bool:
        """Whether this is the step of its pair that is followed by a save."""
        first = -(-self._block(step) * self._steps // self._num)
        third = self._steps // self._num // 3
        return self.on(step) and self._block(step) % (2 * self._num) <= 1 and step == first + third

    def speeds(self, times: list[float], repeats: int) -> tuple[list[float], list[float]]:
        """Steps a second with them and without, of as many pairs; `times` in s: when each step began, and the end."""
        speeds: tuple[list[float], list[float]] = ([], [])
        for number in range(repeats):
            seconds, nums = [0.0, 0.0], [0, 0]
            for step in range(2 * self._steps * number, 2 * self._steps * (number + 1)):
                seconds[not self.on(step)] += times[step + 1] - times[step]
                nums[not self.on(step)] += 1
            for found, num, took in zip(speeds, nums, seconds, strict=True):
                found.append(num / took)
        return speeds

    def _block(self, step: int) -> int:
        return step * self._num // self._steps


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

        All are blocks of one training, so that memory lies where it lies in both.
        """
        beat, blocks = self.line.on_beat, Blocks(self.steps)
        guarded = replace(self.config, max_steps=WARM_UP + 2 * repeats * self.steps + 1)
        saving, unguarded = replace(guarded, save_every=1), replace(guarded, check_replicas=0)
        model, optimizer, clock = self._start()
        trainer = Trainer(guarded, model, optimizer, self.data, self.backend)

        def switch() -> None:
            step = max(trainer.step - WARM_UP, 0)
            if blocks.on(step):
                trainer.config, self.line.on_beat = saving if blocks.saves(step) else guarded, beat
            else:
                trainer.config, self.line.on_beat = unguarded, lambda: None

        model.register_forward_pre_hook(lambda module, _: switch() if module.training else None)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                trainer.fit()
        finally:
            self.line.on_beat = beat
        return blocks.speeds(clock.times[WARM_UP:], repeats)

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
