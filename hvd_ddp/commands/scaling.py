"""scaling: throughput and efficiency over 1, 2, 4, ... ranks inside one allocation, for each backend."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

import yaml

from hvd_ddp.backends import BACKENDS, why_not
from hvd_ddp.commands.plot import refuse_to_replace, render
from hvd_ddp.commands.scaling_table import Cell, as_csv, efficiencies, refuse_other_csv, show
from hvd_ddp.commands.starters import Place, look, outside, run_to_the_end
from hvd_ddp.commands.train import config_of, parse_as
from hvd_ddp.config import TrainConfig, free
from hvd_ddp.durable import replace_file
from hvd_ddp.errors import FAILED, FINISHED, HvdDDPError
from hvd_ddp.job.launch import Launch

WARM_UP, EVERY = 20, 10  # steps that do not count; steps of an interval whose throughput is one figure
NEVER = 1 << 30
SIMULATE = "--simulate"  # has options of its own

DESCRIPTION = """Train a few steps on 1, 2, 4, ... ranks under each backend, inside one allocation or on this machine.

Takes all options of train. Writes OUTPUT.csv, OUTPUT.png and OUTPUT.svg: samples a second, with the ideal that is in
proportion to the fewest ranks, and efficiency, the share of that ideal. Strong scaling keeps the global batch, weak
scaling makes it --global-batch for each rank. Threads a rank are the same for all numbers of ranks.

Ranks are started by srun inside a Slurm allocation, by the mpirun of the MPI that mpi4py loads (on the hosts of
--hostfile or of its scheduler, else on this machine), or by this program. Exit code 1 where a run failed; the figures
of the others are kept.

With --simulate it measures one rank alone and works out 1 to 4,096: see scaling --simulate --help."""


@dataclass(frozen=True)
class Options(TrainConfig):
    """Options that are not part of the run."""

    nproc: int | None = free(None)
    """Most ranks: 1, 2, 4, ... up to this. None: what the allocation or the hostfile has room for, or a rank a core."""
    config: Path | None = None
    """As for train."""
    mode: Literal["strong", "weak"] = "strong"
    """strong: the same global batch on any number of ranks; weak: in proportion to the ranks."""
    steps: int = 100
    """Steps of a run that count, after 20 that do not; each 10 give a figure, of which the median is the run's."""
    repeats: int = 3
    """Runs of each, in turns; the median counts."""
    start_with: Literal["auto", "nproc", "mpirun", "srun"] = "auto"
    """What starts ranks. nproc: this program, on this machine."""
    hostfile: Path | None = None
    """Hosts for mpirun, lines of `host slots=N`."""
    output: Path = Path("scaling")
    """Files to write, without their endings; those of an earlier scaling are replaced."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        """Raise ValueError for values that can't work."""
        super().__post_init__()
        if self.steps < EVERY or self.repeats < 1:
            raise ValueError(
                f"--steps is `{self.steps}`, --repeats `{self.repeats}`: nothing would be measured. Give at least "
                f"{EVERY} steps and one repeat."
            )
        if self.backend == "local":
            raise ValueError("--backend local is one process, which does not scale. Use ddp, horovod or auto.")
        if self.hostfile is not None and self.start_with not in ("auto", "mpirun"):
            raise ValueError(f"--hostfile is for mpirun, --start-with is `{self.start_with}`. Leave one out.")


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp scaling`."""
    if SIMULATE in arguments:
        from hvd_ddp.commands import simulate

        return simulate.run([argument for argument in arguments if argument != SIMULATE])
    launch = outside("scaling")
    options = parse_as(Options, arguments, "scaling", description=DESCRIPTION)
    files = {kind: options.output.with_name(f"{options.output.name}.{kind}") for kind in ("csv", "png", "svg")}
    refuse_other_csv(files["csv"])
    for kind in ("png", "svg"):
        refuse_to_replace(files[kind])
    place = look(launch, options.start_with, options.hostfile)
    sizes = sizes_up_to(options.nproc or place.num_ranks)
    cells = [Cell(backend, size) for backend in _backends(options, place) for size in sizes]
    try:
        with tempfile.TemporaryDirectory(prefix=".scaling-", dir=Path.cwd()) as folder:
            _measure(options, place, cells, Path(folder))
        replace_file(files["csv"], as_csv(cells, options.mode).encode())
        if any(cell.speeds for cell in cells):
            from hvd_ddp.commands.scaling_plot import draw

            for kind in ("png", "svg"):
                replace_file(files[kind], render(lambda figure: draw(figure, cells, _title(options)), kind))
    except OSError as error:
        raise HvdDDPError(f"`{error.filename}` can't be written: {error.strerror}. Give another --output.") from error
    if options.json:
        print(json.dumps({"rows": [cell.to_dict(value) for cell, value in efficiencies(cells)]}), flush=True)
    else:
        show(cells, _title(options))
        print(", ".join(str(path) for path in files.values()), flush=True)
    return FAILED if any(cell.errors for cell in cells) else FINISHED


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    powers = list(takewhile(lambda size: size < most, (1 << number for number in range(64))))
    return [*powers, most]


def _backends(options: Options, place: Place) -> list[str]:
    """Those that are here; HvdDDPError where there is none."""
    names = [name for name in BACKENDS if name != "local" and options.backend in ("auto", name)]
    launch = Launch(launcher=place.launcher, mpi=place.mpi)
    reasons = {name: why_not(name, options.transport, options.device, launch) for name in names}
    here = [name for name in names if reasons[name] is None]
    if not here:
        raise HvdDDPError(f"Nothing to measure: {' '.join(filter(None, reasons.values()))}")
    for name in names:
        if reasons[name] is not None:
            print(f"{name} is not here. {reasons[name]}", file=sys.stderr, flush=True)
    return here


def _measure(options: Options, place: Place, cells: list[Cell], folder: Path) -> None:
    """All cells in turns, so that what slows the machine down for a while hits each."""
    threads = options.threads
    if threads == "auto":
        threads = max(1, place.cores // min(place.ranks_a_node, max(cell.num_ranks for cell in cells)))
    for number in range(options.repeats):
        for cell in cells:
            if cell.errors:
                continue
            print(f"{number + 1} of {options.repeats}: {cell.name} ...", file=sys.stderr, flush=True)
            notes = folder / f"{cell.backend}-{cell.num_ranks}-{number}"
            notes.mkdir()
            growth = cell.num_ranks if options.mode == "weak" else 1
            config = config_of(
                options,
                backend=cell.backend, nproc=None, threads=threads, run_dir=notes / "run",
                global_batch=options.global_batch * growth, max_steps=WARM_UP + options.steps,
                log_every=EVERY, save_every=NEVER, eval_every=NEVER, early_stop=None,
            )  # fmt: skip
            path = notes / "options.yaml"
            path.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))
            ended = run_to_the_end(place.command(cell.num_ranks, ["train", "--config", str(path)]), notes / "log")
            if ended.code:
                cell.errors.append(ended.said)
                print(f"{cell.name} failed: {ended.said}", file=sys.stderr, flush=True)
            else:
                cell.take((notes / "run/metrics.jsonl").read_text(), after=WARM_UP)


def _title(options: Options) -> str:
    each = " a rank" if options.mode == "weak" else ""
    return (
        f"{options.mode} scaling: {options.data}, {options.model}, {options.optimizer}, {options.precision}, "
        f"global batch {options.global_batch}{each}"
    )
