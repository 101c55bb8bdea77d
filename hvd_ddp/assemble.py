"""Model and data by the names in the configuration, the same on every rank or on none; whether they fit each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hvd_ddp import checkpoint, models, tasks
from hvd_ddp.backends.base import Backend
from hvd_ddp.config import PLAIN, Communication, TrainConfig
from hvd_ddp.data import datasets
from hvd_ddp.data.arrays import Data, has_classes, is_pixels
from hvd_ddp.data.loader import blank
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.outside import open_regular
from hvd_ddp.precision import Precision
from hvd_ddp.resume import has_checkpoints
from hvd_ddp.seeding import seed_all
from hvd_ddp.tasks import Checked, Classification, Task


def load_data(name: str, data_dir: Path | None, backend: Backend, *, stage: Path | None = None) -> Data:
    """The data set of that name; if one rank can't read it, no rank goes on.

    What can be packed is packed once, by rank 0, and mapped by all; with `stage`, copied to that folder once a node.
    Of what can't, rank 0 finds out what all have to know.
    """
    source = datasets.find(name)
    if stage is None and source.survey is not None:
        survey = source.survey
        found = backend.bytes_from_main(lambda: survey.look(data_dir))
        return backend.together(lambda: survey.read(data_dir, found))
    backend.on_main(lambda: datasets.pack(name, data_dir))
    if stage is None:
        return backend.together(lambda: datasets.load(name, data_dir))
    first = backend.launch.local_rank == 0
    backend.together(lambda: datasets.stage(name, data_dir, stage) if first else None)
    return backend.together(lambda: datasets.load_staged(name, stage))


def load_model(config: TrainConfig, data: Data, backend: Backend) -> nn.Module:
    """The model with its first weights: from --seed, or from --init where no checkpoint will replace them."""
    if config.task == tasks.CLASSIFICATION:
        want_classes(data)  # before a model is asked for as many outputs as there are classes
    seed_all(config.seed, backend.device)
    model = backend.together(lambda: models.build(config.model, data.num_classes, data.image_shape))
    if config.init is not None and not backend.on_main(lambda: has_checkpoints(config, backend.launch)):
        load_weights(model, config.init, backend)
    return model


def load_weights(model: nn.Module, path: Path, backend: Backend) -> None:
    """Take the weights of a checkpoint or a bare state dict, strictly; rank 0 reads. Raises HvdDDPError."""
    data = backend.bytes_from_main(lambda: read_weights(path))
    backend.together(lambda: fit_weights(model, checkpoint.parse(data, str(path)), str(path)))


def read_weights(path: Path) -> bytes:
    """The bytes of a file of weights; verified if it has a hash beside it."""
    if path.with_name(path.name + ".sha256").exists():
        return checkpoint.verified(path)
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise HvdDDPError(f"`{path}` can't be read: {error.strerror}. Give a checkpoint or a state dict.") from error


def fit_weights(model: nn.Module, state: dict[str, Any], origin: str) -> None:
    """Load the weights, averaged ones where there are; HvdDDPError where names or shapes are not the model's."""
    try:
        model.load_state_dict({**state["model"], **state.get("ema", {})} if "model" in state else state)
    except (RuntimeError, AttributeError, TypeError) as error:
        said = " ".join(str(error).split())
        raise HvdDDPError(f"The weights in `{origin}` do not fit the model: {said[:300]}") from error


def load_task(config: TrainConfig, data: Data, backend: Backend, task: Task | None = None) -> Checked:
    """The task that is given, or else that of the configuration. Raises HvdDDPError where it can't be had, or where
    the built-in one meets targets that are no classes.
    """

    def load() -> Checked:
        chosen = Checked(task or tasks.build(config.task, config.label_smoothing))
        if type(chosen.task) is Classification:
            want_classes(data)
        return chosen

    return backend.together(load)


def want_classes(data: Data) -> None:
    """Raise HvdDDPError for targets with which the built-in task can do nothing."""
    if not has_classes(data.train):
        raise HvdDDPError(
            f"--data `{data.name}` has targets of the type {data.train.target_dtype} and the shape "
            f"`{data.train.target_shape}` a sample, and classification wants one class. Return whole numbers, or give "
            "a --task of your own."
        )


def try_out(task: Checked, model: nn.Module, data: Data, precision: Precision, backend: Backend) -> None:
    """Let a task of the user's own show its answers for two samples of zeros, before anything starts."""
    batch = blank(data.train, 2, device=backend.device, dtype=precision.dtype)
    with backend.meeting.pulse.long_work("trying the task"), precision.autocast():
        backend.together(lambda: task.try_out(model, batch))


def check(config: TrainConfig, data: Data, world_size: int, communication: Communication = PLAIN) -> None:
    """Raise HvdDDPError for options that do not fit the data, the number of ranks or what the backend was told."""
    if config.communication != communication:
        raise HvdDDPError(
            f"The options say `{config.communication.given()}` of communication, the backend was connected with "
            f"`{communication.given()}`. Use connect(communication=config.communication)."
        )
    if config.augment != "none" and not is_pixels(data.train.dtype):
        raise HvdDDPError(
            f"--augment is `{config.augment}`, but the samples of {data.name} are `{data.train.dtype}`: only "
            "uint8 images can be cropped and flipped. Use --augment none."
        )
    if config.augment != "none" and not has_classes(data.train):
        raise HvdDDPError(
            f"--augment is `{config.augment}`, but the targets of {data.name} are no classes: images would be cropped "
            "and flipped, and targets not. Use --augment none, and change both in the data set."
        )
    num_samples = data.num_train
    if num_samples is None and (config.max_steps is None or config.schedule == "step"):
        raise HvdDDPError(
            f"{data.name} comes in a stream whose length nobody knows: neither --epochs nor --schedule step tell a "
            "step. Give --max-steps, with --schedule constant or cosine."
        )
    if num_samples is not None and num_samples < config.global_batch:
        raise HvdDDPError(
            f"--global-batch is `{config.global_batch}`, but {data.name} has `{num_samples}` training samples: not "
            "one whole step. Use a smaller --global-batch."
        )
    if config.global_batch < world_size * config.accumulate:
        raise HvdDDPError(
            f"--global-batch is `{config.global_batch}`, for {world_size} ranks with --accumulate "
            f"{config.accumulate}: some micro-batches would be empty in every step. Use a --global-batch of at least "
            f"{world_size * config.accumulate}, or fewer ranks."
        )
    last = (num_samples or 1) % config.global_batch  # a stream may end with one sample
    if config.sync_bn and 0 < last < world_size * config.accumulate:
        raise HvdDDPError(
            f"--sync-bn needs a sample of every rank in each micro-batch, but the last step of an epoch has `{last}` "
            f"for {world_size} ranks with --accumulate {config.accumulate}. Use another --global-batch, or fewer ranks."
        )
