"""scaling --simulate: what a step costs here, on one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import torch
from torch import Tensor, nn

from hvd_ddp.assemble import load_data, load_model
from hvd_ddp.backends import connect
from hvd_ddp.config import TrainConfig
from hvd_ddp.costs import Costs, Gradient
from hvd_ddp.optim import build
from hvd_ddp.trainer import Trainer

WARM_UP, COUNTED = 2, 5  # steps


def record_training(config: TrainConfig) -> Costs:
    """Of the trainer's own step, in this process, on its CPU. Raises HvdDDPError for what train would refuse."""
    with connect("local", device="cpu", threads=config.threads) as backend:
        data = load_data(config.data, config.data_dir, backend, stage=config.stage)
        model = load_model(config, data, backend)
        trainer = Trainer(config, model, build(config, model), data, backend)
        with closing(trainer.feed):
            trainer.feed.start()
            steps = trainer.feed.steps(trainer.place, WARM_UP + COUNTED)

            def step() -> None:
                given = next(steps)
                trainer.train_step(given.micros, given.window)

            threads = torch.get_num_threads()
            clock, by = (
                (time.thread_time, " by its CPU time") if threads == 1 else (time.perf_counter, "s by the clock")
            )
            shape = "x".join(map(str, data.image_shape))
            about = f"samples of {shape}, {config.optimizer}, {config.precision}, {threads} thread{by}"
            return record(model, step, name=config.model, about=about, samples=config.global_batch, clock=clock)


def record(
    model: nn.Module,
    step: Callable[[], object],
    *,
    name: str,
    about: str,
    samples: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs:
    """The step of median length, of some; `step` does one with the bare model, its last backward is looked at.

    `clock`: time.thread_time leaves out what other programs do on the core meanwhile; one thread has to do it all.
    """
    forward_ended, ready, turns = 0.0, dict[Tensor, float](), list[tuple[float, dict[Tensor, float]]]()

    def at_forward(*_: object) -> None:
        nonlocal forward_ended
        forward_ended = clock()

    def at_gradient(parameter: Tensor) -> None:
        ready[parameter] = clock() - forward_ended

    hooks = [model.register_forward_hook(at_forward)]
    hooks += [p.register_post_accumulate_grad_hook(at_gradient) for p in model.parameters() if p.requires_grad]
    try:
        for _ in range(WARM_UP + COUNTED):
            began = clock()
            step()
            turns.append((clock() - began, ready.copy()))
    finally:
        for hook in hooks:
            hook.remove()
    seconds, moments = sorted(turns[WARM_UP:], key=lambda turn: turn[0])[COUNTED // 2]
    gradients = [Gradient(moment, parameter.nbytes) for parameter, moment in moments.items()]
    return Costs(name, about, samples, seconds, adding(), tuple(sorted(gradients)))


def adding() -> float:
    """Seconds to add one byte of gradients to another here; the quickest of some, in memory and not in a cache."""
    mine, theirs, times = torch.ones(1 << 23), torch.ones(1 << 23), list[float]()
    for _ in range(5):
        began = time.perf_counter()
        mine += theirs
        times.append(time.perf_counter() - began)
    return min(times) / mine.nbytes
