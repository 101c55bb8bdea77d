"""train --dry-run: build everything, run two steps, tell what the rest would take; nothing is written."""

from __future__ import annotations

import resource
import time
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hvd_ddp.assemble import try_out
from hvd_ddp.banner import banner
from hvd_ddp.run import Run

if TYPE_CHECKING:
    from hvd_ddp.trainer import Trainer

STEPS = 2  # of which the last one is timed: the first also allocates and compiles


def dry_run(trainer: Trainer) -> None:
    """Raises HvdDDPError for whatever the training itself would refuse, its run directory included."""
    config, backend, num_samples = trainer.config, trainer.backend, trainer.data.num_train
    with (
        closing(trainer.feed),
        Run(config, backend, total_steps=trainer.total_steps, num_samples=num_samples) as run,
    ):
        if run.start.finished:
            run.already_finished()
            return
        for line in banner(config, backend, run.directory):
            run.console.line(line)
        with trainer.pulse.long_work("starting loader workers"):
            trainer.feed.start()
        try_out(trainer.task, trainer.model, trainer.data, trainer.precision, backend)
        start = f"go on from {run.start.checkpoint}" if run.start.checkpoint else "begin at step 0"
        slowest = max(backend.all_gather_object(_timed(trainer)))
        memory, gpu = (max(sizes) for sizes in zip(*backend.all_gather_object(_memory(backend.device)), strict=True))
        whole = timedelta(seconds=round(slowest * trainer.total_steps))
        checkpoint = sum(_sizes(trainer.state_dict()))
        for line in (
            f"dry run: {STEPS} steps done, nothing written; the training would {start}",
            f"{slowest:.3g} s a step: {trainer.total_steps} steps take {whole}, evaluations and saves left out",
            f"memory: at most {memory / 1e6:,.0f} MB a rank" + (f", {gpu / 1e6:,.0f} MB of its GPU" if gpu else ""),
            f"a checkpoint: {checkpoint / 1e6:,.1f} MB; {config.keep} and the best one are kept",
        ):
            run.console.line(line)


def _timed(trainer: Trainer) -> float:
    """Seconds of the last step."""
    began = time.perf_counter()
    for step in trainer.feed.steps(trainer.place, STEPS):
        trainer.train_step(step.micros, step.window)
        if trainer.backend.device.type == "cuda":
            torch.cuda.synchronize(trainer.backend.device)
        ended = time.perf_counter()
        seconds, began = ended - began, ended
    return seconds


def _memory(device: torch.device) -> tuple[int, int]:
    """Bytes that this process has had at most, of the host and of its GPU."""
    gpu = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, gpu


def _sizes(state: object) -> list[int]:
    """Bytes of each tensor."""
    if isinstance(state, Tensor):
        return [state.nbytes]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [size for part in parts for size in _sizes(part)]
