"""train: options -> ranks -> model, data, optimizer -> Trainer."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from hvd_ddp.commands.importing import importing
from hvd_ddp.commands.options import command_line
from hvd_ddp.config import TrainConfig
from hvd_ddp.errors import FINISHED, HvdDDPError
from hvd_ddp.heap import let_go
from hvd_ddp.job.launch import detect, is_speaker
from hvd_ddp.job.scheduler import end_of_allocation
from hvd_ddp.job.spawn import spawn, wants_ranks
from hvd_ddp.job.stop import Signals
from hvd_ddp.outside import from_yaml, read

if TYPE_CHECKING:
    from hvd_ddp.backends.base import Backend
    from hvd_ddp.trainer import Trainer

T = TypeVar("T", bound=TrainConfig)
NO_TIMEOUT = 7 * 86400.0  # seconds: of collectives; the health of the job knows better who keeps whom waiting

LONGEST = 300  # characters that an error quotes of a file

RECIPES = Path(__file__).parent.parent / "recipes"

DESCRIPTION = """Train a model on one rank or thousands, under DDP or Horovod.

Other commands: submit, launch, doctor, evaluate, predict, plot, parity, scaling, data, bench, completion,
install-horovod (each with --help)."""


@dataclass(frozen=True)
class Options(TrainConfig):
    """Options that are not part of the run."""

    config: Path | None = None
    """YAML file with any of these options, with underscores, or the name of a recipe of the package; the command line
    wins."""
    print_config: bool = False
    """Print the whole configuration as YAML and stop."""
    dry_run: bool = False
    """Build everything, run two steps, tell what time and memory the training would take, and write nothing."""


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp train`."""
    options = parse(arguments, show_errors=is_speaker())
    config = config_of(options)
    if options.print_config:
        if is_speaker():
            # A line an option, also a long one: the batch templates read it.
            text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True, width=math.inf)
            print(text, end="")
        return FINISHED
    if wants_ranks(config.nproc, detect()):
        return spawn(config.nproc or 1, ["train", *arguments])
    return train(config, only_try=options.dry_run)


def config_of(options: TrainConfig, **changes: Any) -> TrainConfig:
    """What of a command's options is of the run, with changes. Raises ValueError for values that can't work."""
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    return TrainConfig(**{**{name: getattr(options, name) for name in names}, **changes})


def parse(arguments: list[str], *, show_errors: bool = True) -> Options:
    """The options of `train`; see `parse_as`."""
    return parse_as(Options, arguments, description=DESCRIPTION, show_errors=show_errors)


def parse_as(kind: type[T], arguments: list[str], name: str = "", *, description: str, show_errors: bool = True) -> T:
    """Options from the command line and the YAML file that it names; see `hvd_ddp.commands.options`."""
    defaults: dict[str, Any] = {}
    path = _config_file(arguments)
    if path is not None:
        defaults = _read_yaml(path)
    words = [word for option, value in defaults.items() for word in _as_arguments(option, value)]
    return command_line(kind, [*words, *arguments], name, description=description, show_errors=show_errors)


def _config_file(arguments: list[str]) -> Path | None:
    for position, argument in enumerate(arguments):
        if argument.startswith("--config="):
            return Path(argument.partition("=")[2])
        if argument == "--config" and position + 1 < len(arguments):
            return Path(arguments[position + 1])
    return None


def _recipe(path: Path) -> Path:
    """The file itself, or the recipe of that name, which is a word without a dot or slash."""
    if path.is_file() or path.name != str(path) or path.suffix:
        return path
    recipes = {recipe.stem: recipe for recipe in sorted(RECIPES.glob("*.yaml"))}
    if path.name not in recipes:
        near = difflib.get_close_matches(path.name, recipes, 1)
        raise HvdDDPError(
            f"--config is `{path}`, which is neither a file nor one of the recipes: {', '.join(recipes)}."
            + (f" Did you mean {near[0]}?" if near else "")
        )
    return recipes[path.name]


def _read_yaml(path: Path) -> dict[str, Any]:
    path = _recipe(path)
    try:
        values = from_yaml(read(path))
    except (OSError, ValueError) as error:
        raise HvdDDPError(f"--config `{path}` can't be read: {' '.join(str(error).split())[:LONGEST]}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise HvdDDPError(f"--config `{path}` is a {type(values).__name__}, not options. Write `name: value` lines.")
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, 1)
            raise HvdDDPError(
                f"--config `{path}` has `{str(name)[:LONGEST]}`, which is no option."
                + (f" Did you mean {near[0]}?" if near else f" Options are: {', '.join(names)}.")
            )
    return values


def _as_arguments(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, int) and value.bit_length() > 128:
        raise HvdDDPError(f"--config: {name} is a number of {value.bit_length()} bits. Write one that it can be.")
    if isinstance(getattr(TrainConfig, name), tuple):
        several = value.split() if isinstance(value, str) else value
        if isinstance(several, list) and all(isinstance(word, str) for word in several):
            return [f"--{flag}", *several]
        raise HvdDDPError(f"--config: {name} is `{str(value)[:LONGEST]}`. Write words, or a list of them.")
    if value is not None and not isinstance(value, str | int | float | date):  # aliases may make a list endless
        raise HvdDDPError(f"--config: {name} is a {type(value).__name__}. Write one value.")
    if isinstance(getattr(TrainConfig, name), bool) and not isinstance(value, bool):
        raise HvdDDPError(f"--config: {name} is `{str(value)[:LONGEST]}`. Write true or false.")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}={value}"]


def train(config: TrainConfig, make: Callable[..., Trainer] | None = None, *, only_try: bool = False) -> int:
    """Be a rank of this run, with the trainer that `make` makes, and return its exit code."""
    signals = Signals()  # before torch is imported: the warning must not kill a job that is still starting
    warning = getattr(signal, f"SIG{config.signal}")
    signals.catch(warning)
    # Not where the model is: torch keeps errors of imports that it can do without, and these the frames above them.
    with importing():
        import torch._dynamo  # noqa: F401  # 900 files, which the first optimizer would import
    code = _train(config, make, signals, warning, only_try=only_try)
    let_go()
    return code


def _train(
    config: TrainConfig,
    make: Callable[..., Trainer] | None,
    signals: Signals,
    warning: signal.Signals,
    *,
    only_try: bool,
) -> int:
    from hvd_ddp.backends import connect
    from hvd_ddp.job.health import ends_together

    backend = connect(
        config.backend,
        config.transport,
        config.device,
        threads=config.threads,
        directory=config.run_dir or Path("runs"),
        start_timeout=config.start_timeout,
        timeout=NO_TIMEOUT,
        communication=config.communication,
    )
    stop = backend.meeting.stop
    stop.signals, stop.warning = signals, warning
    with ends_together(backend.meeting, timeout=config.timeout), backend:
        from hvd_ddp.assemble import load_data, load_model
        from hvd_ddp.optim import build
        from hvd_ddp.trainer import Trainer

        if config.stop_before is not None:
            _stop_before(config.stop_before, backend)
        with backend.meeting.pulse.long_work("loading data"):
            data = load_data(config.data, config.data_dir, backend, stage=config.stage)
        with backend.meeting.pulse.long_work("building the model"):
            model = load_model(config, data, backend)
            optimizer = build(config, model)
        trainer = (make or Trainer)(config, model, optimizer, data, backend)
        if only_try:
            from hvd_ddp.commands.dry_run import dry_run

            dry_run(trainer)
        results = {"status": "finished"} if only_try else trainer.fit()
    if results["status"] == "finished" or stop.order is None:
        signals.ignore()
        return FINISHED
    sys.stdout.flush()
    os._exit(stop.order.exit_code)  # all at once: mpirun kills the others 0.5 s after the first


def _stop_before(minutes: float, backend: Backend) -> None:
    """Let rank 0 watch the clock."""
    launch = backend.launch

    def ask(known: float | None) -> float:
        return end_of_allocation(launch.scheduler, launch.scheduler_job, known)

    ends_at = backend.on_main(lambda: ask(launch.ends_at))  # refused by all where it can't be known
    if backend.is_main:
        backend.meeting.stop.before_the_end(minutes, ends_at, ask)
