"""bench step: what the trainer costs against loops written by hand for the same training."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hvd_ddp.commands.bench import Row, ratio, show
from hvd_ddp.commands.bench_ranks import start
from hvd_ddp.commands.options import command_line
from hvd_ddp.config import Communication, CompressionName, OptimizerName, TrainConfig, TransportName
from hvd_ddp.errors import FINISHED, HvdDDPError

if TYPE_CHECKING:
    from hvd_ddp.backends.base import Backend
    from hvd_ddp.job.line import Line


@dataclass(frozen=True)
class Options:
    """Measure optimizer steps a second of the trainer, under DDP and under Horovod, against a loop of some twenty lines
    for each: the same model, batches from memory, optimizer, transport and number of threads.

    They take turns in the same processes; a turn of the trainer and the turn of a loop beside it make a pair. The ratio
    is the mean over the pairs, with its 95 % interval.

    With --guards instead the trainer with and without what guards a run: heartbeats, checks of the replicas at their
    default, and a save in the background in each turn. These are blocks of one training, which has them on and off.
    """

    nproc: int = 2
    """Ranks to start on this machine, by mpirun if it is there. A launcher's ranks are used as they are."""
    data: str = TrainConfig.data
    """Data set, as for train."""
    data_dir: Path | None = None
    """As for train."""
    model: str = TrainConfig.model
    """As for train."""
    global_batch: int = TrainConfig.global_batch
    """Samples an optimizer step, over all ranks."""
    optimizer: OptimizerName = TrainConfig.optimizer
    """As for train."""
    compression: CompressionName = "none"
    """Of the trainer's gradients, as for train; the loops send them whole."""
    backend: Literal["all", "ddp", "horovod"] = "all"
    """One of them alone, or both."""
    transport: TransportName = "auto"
    """What carries the gradients of both of a pair."""
    every_transport: bool = False
    """A pair for each backend and transport that works here; the ratios are those of --transport."""
    guards: bool = False
    """Measure what guarding a run costs, instead of what the trainer does."""
    steps: int = 200
    """Steps of a turn that count."""
    repeats: int = 7
    """Turns of each; the median counts."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers with which nothing is measured."""
        if not (self.steps >= 1 and self.repeats >= 2 and self.global_batch >= 1 and self.nproc >= 1):
            raise ValueError(
                f"--steps is `{self.steps}`, --repeats `{self.repeats}`, --global-batch `{self.global_batch}`, --nproc "
                f"`{self.nproc}`: nothing would be measured. Give numbers from 1 up, and two repeats for an interval."
            )


@dataclass
class Pair:
    """Two trainings of the same over one backend, by their names: steps a second of each of their turns."""

    backend: Backend
    names: tuple[str, str]
    speeds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def rows(self) -> list[Row]:
        """The two medians."""
        names = [f"{name} {self.backend.name} {self.backend.transport}" for name in self.names]
        return [Row(name, "steps_per_second", speeds) for name, speeds in zip(names, self.speeds, strict=True)]

    def ratio(self) -> tuple[float, tuple[float, float]]:
        """How much faster the first is, and the 95 % interval."""
        return ratio(*self.speeds)


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp bench step`."""
    options = command_line(Options, arguments, "bench step")
    code = start(options.nproc, ["bench", "step", *arguments])
    if code is not None:
        return code
    from hvd_ddp.backends import connect
    from hvd_ddp.job.health import ends_together

    communication = Communication(compression=options.compression)
    first = connect("ddp", options.transport, threads=1, communication=communication)
    with ends_together(first.meeting, timeout=300.0) as line:
        pairs = measure(first, options, line)
        if first.is_main:
            _show(pairs, options, first)
    return FINISHED


def measure(first: Backend, options: Options, line: Line) -> list[Pair]:
    """The pairs with their speeds, on every rank: of DDP, and of Horovod where it is."""
    from hvd_ddp.assemble import load_data
    from hvd_ddp.commands import bench_bare
    from hvd_ddp.commands.bench_turn import Turn

    loops: dict[str, Callable[..., None]] = {"ddp": bench_bare.ddp, "horovod": bench_bare.horovod}
    names = ("guarded", "unguarded") if options.guards else ("hvd_ddp,", "bare")
    pairs = [Pair(backend, names) for backend in _backends(first, options)]
    with first:
        data = load_data(options.data, options.data_dir, first)
        directory = Path(first.on_main(lambda: tempfile.mkdtemp(prefix=".bench-", dir=Path.cwd())))
    try:
        for number in range(1 if options.guards else options.repeats):
            for pair in pairs:
                with pair.backend as backend:
                    config = TrainConfig(
                        data=options.data,
                        model=options.model,
                        global_batch=options.global_batch,
                        optimizer=options.optimizer,
                        compression=options.compression,
                        run_dir=directory / f"{backend.name}-{backend.transport}-{number}",
                    )
                    turn = Turn(config, data, backend, line, steps=options.steps)
                    if options.guards:
                        pair.speeds = turn.guards(options.repeats)
                        continue
                    for which in (0, 1) if number % 2 else (1, 0):
                        pair.speeds[which].append(turn.bare(loops[backend.name]) if which else turn.ours())
    finally:
        if first.is_main:
            shutil.rmtree(directory)
    return pairs


def _backends(first: Backend, options: Options) -> list[Backend]:
    from hvd_ddp.backends import all_here, another

    backends = [first]
    try:
        backends.append(another(first, "horovod", options.transport))
    except HvdDDPError:
        if options.backend == "horovod":
            raise
    if options.every_transport:
        with first:
            known = {(backend.name, backend.transport) for backend in backends}
            backends += [more for more in all_here(first) if (more.name, more.transport) not in known]
    return [backend for backend in backends if options.backend in ("all", backend.name)]


def _show(pairs: list[Pair], options: Options, first: Backend) -> None:
    further: dict[str, Any] = {}
    other = "unguarded" if options.guards else "bare"
    for name in ("ddp", "horovod"):
        these = (pair for pair in pairs if pair.backend.name == name)
        ratio, interval = next((pair.ratio() for pair in these), (None, None))
        further |= {f"ratio_to_{other}_{name}": ratio, f"ratio_to_{other}_{name}_interval": interval}
    title = (
        f"{options.data}, {options.model}, global batch {options.global_batch} over {first.launch.world_size} ranks, "
        f"turns of {options.steps} steps"
    )
    show([row for pair in pairs for row in pair.rows()], title=title, as_json=options.json, **further)
    if not options.json:
        for pair in pairs:
            (ratio, (low, high)), (first_row, second_row) = pair.ratio(), pair.rows()
            print(f"{first_row.name} to {second_row.name}: {ratio:.3f} ({low:.3f} to {high:.3f}, 95 % of paired turns)")
