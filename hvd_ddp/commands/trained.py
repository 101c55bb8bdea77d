"""What evaluate and predict share: a checkpoint, the model and the data that belong to it, on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import tyro

from hvd_ddp.commands.importing import importing
from hvd_ddp.commands.options import command_line
from hvd_ddp.config import BackendName, DeviceName, Precision, TrainConfig, TransportName
from hvd_ddp.errors import FINISHED, HvdDDPError
from hvd_ddp.job.launch import detect
from hvd_ddp.job.spawn import spawn, wants_ranks

if TYPE_CHECKING:
    from torch import nn

    from hvd_ddp.backends.base import Backend
    from hvd_ddp.data.arrays import Data
    from hvd_ddp.data.feed import Feed
    from hvd_ddp.precision import Precision as Numbers
    from hvd_ddp.tasks import Checked

T = TypeVar("T", bound="Choice")
NEEDED = ("data", "data_dir", "model", "task", "precision", "seed", "skip_bad", "workers")  # of the training's options


@dataclass(frozen=True)
class Choice:
    """Which checkpoint, over which data, on which ranks."""

    checkpoint: tyro.conf.Positional[Path]
    """Checkpoint file, or run directory (then its newest whole checkpoint)."""
    best: bool = False
    """Of a run directory the checkpoint of its best evaluation."""
    data: str | None = None
    """Data set. None: the one that it was trained on."""
    data_dir: Path | None = None
    """Folder of the data set's files. None: as in training."""
    model: str | None = None
    """Model. None: the one that was trained."""
    task: str | None = None
    """Loss and figures. None: those of the training."""
    precision: Precision | None = None
    """Numbers to compute in. None: as in training."""
    backend: BackendName = TrainConfig.backend
    """As for train."""
    transport: TransportName = TrainConfig.transport
    """As for train."""
    device: DeviceName = TrainConfig.device
    """As for train."""
    nproc: int | None = None
    """Start this many ranks on this machine."""
    threads: Literal["auto"] | int = TrainConfig.threads
    """CPU threads a rank, as for train."""
    start_timeout: float = TrainConfig.start_timeout
    """Seconds to wait for all ranks at the start."""
    timeout: float = TrainConfig.timeout
    """Seconds of silence after which a peer counts as dead."""


def on_ranks(name: str, kind: type[T], arguments: Sequence[str], work: Callable[[T, Backend], None]) -> int:
    """`python -m hvd_ddp NAME`: read the options, and do the work on every rank."""
    launch = detect()
    options = command_line(kind, arguments, name, show_errors=launch.rank == 0)
    if wants_ranks(options.nproc, launch):
        return spawn(options.nproc or 1, [name, *arguments])
    from hvd_ddp.backends import connect
    from hvd_ddp.job.health import ends_together

    with importing():
        backend = connect(
            options.backend,
            options.transport,
            options.device,
            threads=options.threads,
            start_timeout=options.start_timeout,
            timeout=options.timeout,
        )
    with ends_together(backend.meeting, timeout=options.timeout), backend:
        work(options, backend)
    return FINISHED


@dataclass(frozen=True)
class Trained:
    """The model with its weights, the data and what feeds it, what is asked of them, and the numbers to compute in."""

    model: nn.Module
    task: Checked
    data: Data
    feed: Feed
    numbers: Numbers


@contextlib.contextmanager
def trained(options: Choice, backend: Backend, **changes: Any) -> Iterator[Trained]:
    """All that belongs to the checkpoint, with these `changes` to its configuration."""
    from hvd_ddp import assemble, checkpoint
    from hvd_ddp.data.feed import Rank, feed
    from hvd_ddp.precision import Precision as Numbers

    origin = str(options.checkpoint)
    state = checkpoint.parse(backend.bytes_from_main(lambda: read(options)), origin)
    config = replace(_config(options, state, origin), **changes)
    data = assemble.load_data(config.data, config.data_dir, backend)
    model = assemble.load_model(config, data, backend)
    assemble.fit_weights(model, state, origin)
    task = assemble.load_task(config, data, backend)
    numbers = Numbers(config.precision, backend.device)
    model.to(backend.device, numbers.dtype)
    launch = backend.launch
    rank = Rank(launch.rank, launch.world_size, launch.local_world_size or 1)
    with contextlib.closing(
        feed(config, data, rank, device=backend.device, dtype=numbers.dtype, agree=lambda counts: counts)
    ) as batches:
        with backend.meeting.pulse.long_work("starting loader workers"):
            batches.start()
        yield Trained(model, task, data, batches, numbers)


def read(options: Choice) -> bytes:
    from hvd_ddp import assemble, checkpoint
    from hvd_ddp.state import is_decisions

    path = options.checkpoint
    if not path.is_dir():
        if options.best:
            raise HvdDDPError(
                f"--best is of a run directory, and `{path}` is none. Give the directory, or leave it out."
            )
        return assemble.read_weights(path)
    newest, data, passed_over = checkpoint.newest_whole(path / "checkpoints")
    if newest is None:
        raise HvdDDPError(f"`{path}` has no whole checkpoint. {' '.join(passed_over)} Give another run or a file.")
    if options.best:
        decisions = checkpoint.parse(data, str(newest)).get("decisions")
        best = decisions.get("best") if isinstance(decisions, dict) and is_decisions(decisions) else None
        if best is None:
            raise HvdDDPError(f"`{path}` has no best checkpoint: nothing has been evaluated. Leave --best out.")
        return checkpoint.verified(checkpoint.of_step(path / "checkpoints", best["step"]))
    return data


def _config(options: Choice, state: dict[str, Any], origin: str) -> TrainConfig:
    """What of the training's configuration an evaluation needs, with what is asked for here in its place."""
    from hvd_ddp.state import is_config

    if not is_config(state.get("config")):
        raise HvdDDPError(f"`{origin}` is no checkpoint of a run: it has no configuration. Give one that train wrote.")
    values = {name: state["config"][name] for name in NEEDED if name in state["config"]}
    for name in ("data", "data_dir", "model", "task", "precision"):
        if getattr(options, name) is not None:
            values[name] = getattr(options, name)
        elif name in ("data", "model", "task"):
            _refuse_code(name, values.get(name), origin)
    try:
        return TrainConfig.from_dict(values)
    except ValueError as error:
        raise HvdDDPError(f"`{origin}` has a configuration that train can't have written: {error}") from error


def _refuse_code(option: str, name: Any, origin: str) -> None:
    """Raise HvdDDPError where a checkpoint, which may be anybody's, names code to run that is not the user's own."""
    from hvd_ddp.models import is_own_code

    if not isinstance(name, str) or ":" not in name or name.startswith(("image_folder:", "synthetic:")):
        return
    if not is_own_code(name):
        raise HvdDDPError(
            f"`{origin}` names `{name[:100]}` as its {option}, which is not among your own files: whoever wrote the "
            f"checkpoint would have it run here. If that is what you want, say so: --{option} {name[:100]}."
        )
