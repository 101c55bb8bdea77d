"""bench peers: a rank of one library's turn.

`python -m hvd_ddp bench peers rank FILE FOLDER`, which `bench peers` starts.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from hvd_ddp import models
from hvd_ddp.commands.bench_turn import NEVER, WARM_UP, Clock, few_to_evaluate, numbers, rows
from hvd_ddp.commands.peers import Job
from hvd_ddp.config import TrainConfig
from hvd_ddp.data.arrays import ArrayDataset, Data
from hvd_ddp.data.datasets import load
from hvd_ddp.errors import FINISHED, HvdDDPError, RankFailedError
from hvd_ddp.job.launch import detect
from hvd_ddp.optim import build
from hvd_ddp.seeding import seed_all

CPU = torch.device("cpu")
SOME = 1000  # training samples, of which the loss is taken


def run(arguments: list[str]) -> int:
    """Train; rank 0 leaves in the folder how fast that was, the weights, and the loss that they have."""
    file, folder = arguments[0], Path(arguments[1])
    options = json.loads((folder / "options.json").read_text())
    job = prepare(options, folder)
    try:
        import_module(f"hvd_ddp.commands.peers.{file}").train(job)
    except Exception as error:  # whatever a library raises, here or on another machine: the others are to be measured
        raise RankFailedError(f"{type(error).__name__}: {error}") from error
    if job.launch.rank == 0:
        job.model.eval()
        with torch.no_grad():
            loss = functional.cross_entropy(job.model(job.inputs[:SOME]), job.targets[:SOME]).item()
        result = {"steps_per_second": job.clock.steps_per_second(options["steps"]), "loss": loss}
        torch.save(job.model.state_dict(), folder / "weights.pt")
        (folder / "result.json").write_text(json.dumps(result))
    return FINISHED


def prepare(options: dict[str, Any], folder: Path) -> Job:
    """What each library is given, on a core of this rank's own."""
    launch = detect()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[launch.local_rank % len(cores)]})
    torch.set_num_threads(1)
    config = TrainConfig(
        data=options["data"], global_batch=options["global_batch"], optimizer="sgd", lr=0.01,
        max_steps=WARM_UP + options["steps"] + 1, eval_every=NEVER, save_every=NEVER, run_dir=folder / "run",
    )  # fmt: skip
    data = whole_batches(few_to_evaluate(load(config.data, options["data_dir"] and Path(options["data_dir"]))), config)
    inputs, targets = numbers(data)
    chosen = list(rows(config, len(inputs), rank=launch.rank, world_size=launch.world_size))
    seed_all(config.seed, CPU)
    model = models.build(config.model, data.num_classes, data.image_shape)
    optimizer = build(config, model)
    return Job(config, data, launch, model, optimizer, Clock(model), chosen, inputs, targets, folder, options["ports"])


def whole_batches(data: Data, config: TrainConfig) -> Data:
    """Without the last samples that fill no global batch: each library would weigh them in its own way."""
    train = data.train
    assert isinstance(train, ArrayDataset)
    number = len(train) // config.global_batch * config.global_batch
    if number == 0:
        raise HvdDDPError(
            f"--global-batch is `{config.global_batch}`, {data.name} has `{len(train)}`. Use a smaller one."
        )
    return replace(data, train=ArrayDataset(train.images[:number], train.targets[:number]))
