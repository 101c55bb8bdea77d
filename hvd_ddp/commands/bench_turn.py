"""bench step: one turn of the trainer, and one of a loop by hand, over a backend that is set up."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

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
NEVER = 1 << 30


class Clock:
    """Counts a model's forwards in training, and how long all but the first took."""

    def __init__(self, model: nn.Module) -> None:
        self.times: list[float] = []
        model.register_forward_pre_hook(lambda module, _: self._tick() if module.training else None)

    def _tick(self) -> None:
        self.times.append(time.perf_counter())

    def steps_per_second(self) -> float:
        """From the forward after the warm-up to the last one."""
        counted = self.times[WARM_UP:]
        return (len(counted) - 1) / (counted[-1] - counted[0])


class Turn:
    """One turn of each of a pair. `line`: what the heartbeats go over."""

    def __init__(self, config: TrainConfig, data: Data, backend: Backend, line: Line, *, steps: int) -> None:
        self.config = replace(config, max_steps=WARM_UP + steps + 1, eval_every=NEVER, save_every=NEVER)
        self.data, self.backend, self.line = data, backend, line
        self.middle = WARM_UP + max(steps // 2, 1)
        if not isinstance(data.train, ArrayDataset):
            raise HvdDDPError(f"--data {data.name} is not in memory. Use a data set of arrays, such as digits.")
        self.train = data.train

    def ours(self) -> float:
        """Steps a second of the trainer, as `train` runs it."""
        return self._train(self.config)

    def guarded(self) -> float:
        """The same with a save in the middle."""
        return self._train(replace(self.config, save_every=self.middle))

    def unguarded(self) -> float:
        """The same without heartbeats, without checks of the replicas, without a save."""
        folder = Path(f"{self.config.run_dir}-unguarded")
        beating, self.line.on_beat = self.line.on_beat, lambda: None
        try:
            return self._train(replace(self.config, check_replicas=0, run_dir=folder))
        finally:
            self.line.on_beat = beating

    def _train(self, config: TrainConfig) -> float:
        model, optimizer, clock = self._start()
        with contextlib.redirect_stdout(io.StringIO()):
            Trainer(config, model, optimizer, self.data, self.backend).fit()
        return clock.steps_per_second()

    def bare(self, loop: Callable[..., None]) -> float:
        """Steps a second of a loop by hand, whose samples are numbers in memory already."""
        model, optimizer, clock = self._start()
        device = self.backend.device
        shape = (-1, *[1] * (len(self.data.image_shape) - 1))
        mean, std = (torch.tensor(values).view(shape) for values in (self.data.mean, self.data.std))
        inputs = ((torch.tensor(self.train.images, dtype=torch.float32) - mean) / std).to(device)
        loop(model.to(device), optimizer, self._rows(), inputs, torch.tensor(self.train.targets).to(device))
        gc.collect()  # DDP's wrapper must not outlive its group
        return clock.steps_per_second()

    def _start(self) -> tuple[nn.Module, Optimizer, Clock]:
        model = load_model(self.config, self.data, self.backend)
        return model, build(self.config, model.parameters()), Clock(model)

    def _rows(self) -> Iterator[Tensor]:
        launch, config = self.backend.launch, self.config
        steps = 0
        for epoch in itertools.count():
            sampler = GlobalBatchSampler(
                len(self.train), config.global_batch,
                rank=launch.rank, world_size=launch.world_size, seed=config.seed, epoch=epoch,
            )  # fmt: skip
            for indices, _ in sampler:
                yield torch.from_numpy(indices)
                steps += 1
                if steps == config.max_steps:
                    return
