"""submit: a batch template with nodes, a limit and the options of a training, shown and handed to the scheduler."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hvd_ddp.commands.options import command_line
from hvd_ddp.commands.train import parse
from hvd_ddp.errors import FAILED, FINISHED, HvdDDPError

TEMPLATES = (Path("slurm"), Path(__file__).parents[2] / "slurm")  # the user's copies first


@dataclass(frozen=True)
class Options:
    """Submit a training: python -m hvd_ddp submit --nodes 4 --ranks-per-node 8 --time 12:00 -- TRAIN OPTIONS

    Looks at the options of train, shows the command that hands the template to the scheduler, and runs it. What is not
    given is as the template says.
    """

    nodes: int | None = None
    """Hosts. None: as the template says, here and below."""
    ranks_per_node: int | None = None
    """Ranks on each host."""
    cores_per_rank: int | None = None
    """Cores for each rank."""
    time: str | None = None
    """Limit, HH:MM or HH:MM:SS. It does not end a run: stopped before it, the run goes back into the queue."""
    queue: str | None = None
    """Partition of Slurm, queue of PBS and LSF."""
    account: str | None = None
    """Account, or project of LSF."""
    name: str | None = None
    """Name of the job."""
    template: Path | None = None
    """Batch script, *.sbatch, *.pbs or *.lsf. None: train.* in the folder slurm, for the scheduler that is here."""
    show: bool = False
    """Show the command and submit nothing."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that no job can have."""
        for field in ("nodes", "ranks_per_node", "cores_per_rank"):
            if (value := getattr(self, field)) is not None and value < 1:
                raise ValueError(f"--{field.replace('_', '-')} is `{value}`. Give a whole number from 1 up.")
        if self.time is not None and not re.fullmatch(r"\d{1,4}:[0-5]\d(:[0-5]\d)?", self.time):
            raise ValueError(f"--time is `{self.time}`. Give hours and minutes, HH:MM or HH:MM:SS.")

    @property
    def hours(self) -> tuple[int, int, int] | None:
        """Hours, minutes, seconds."""
        if self.time is None:
            return None
        parts = [*map(int, self.time.split(":")), 0]
        return parts[0], parts[1], parts[2]


class Scheduler(NamedTuple):
    """How one takes a script."""

    program: str
    ending: str
    command: Callable[[Options, Path, list[str]], list[str]]
    reads_stdin: bool = False


def _slurm(options: Options, template: Path, training: list[str]) -> list[str]:
    limit = None if options.hours is None else "{:02}:{:02}:{:02}".format(*options.hours)
    given = {
        "--nodes": options.nodes, "--ntasks-per-node": options.ranks_per_node,
        "--cpus-per-task": options.cores_per_rank, "--time": limit, "--partition": options.queue,
        "--account": options.account, "--job-name": options.name,
    }  # fmt: skip
    return ["sbatch", *(f"{flag}={value}" for flag, value in given.items() if value), str(template), *training]


def _pbs(options: Options, template: Path, training: list[str]) -> list[str]:
    command = ["env", f"OPTIONS={_in_one(training)}", "qsub", "-v", "OPTIONS"]
    if (size := _size(options)) is not None:
        nodes, ranks = size
        cores = ranks * (options.cores_per_rank or 1)
        command += ["-l", f"select={nodes}:ncpus={cores}:mpiprocs={ranks}"]
    if options.hours is not None:
        command += ["-l", "walltime={:02}:{:02}:{:02}".format(*options.hours)]
    for flag, value in (("-q", options.queue), ("-A", options.account), ("-N", options.name)):
        command += [flag, value] if value else []
    return [*command, str(template)]


def _lsf(options: Options, template: Path, training: list[str]) -> list[str]:
    command = ["env", f"OPTIONS={_in_one(training)}", "bsub"]
    if (size := _size(options)) is not None:
        nodes, ranks = size
        command += ["-n", str(nodes * ranks), "-R", f"span[ptile={ranks}]"]
        command += ["-R", f"affinity[core({options.cores_per_rank})]"] if options.cores_per_rank else []
    if options.hours is not None:
        hours, minutes, seconds = options.hours
        minutes += seconds > 0
        command += ["-W", f"{hours + minutes // 60:02}:{minutes % 60:02}"]
    for flag, value in (("-q", options.queue), ("-P", options.account), ("-J", options.name)):
        command += [flag, value] if value else []
    return command


SCHEDULERS = (
    Scheduler("sbatch", ".sbatch", _slurm),
    Scheduler("qsub", ".pbs", _pbs),
    Scheduler("bsub", ".lsf", _lsf, reads_stdin=True),
)


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp submit`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    training = arguments[end + 1 :]
    options = command_line(Options, arguments[:end], "submit")
    parse(training)  # leaves with 2 where train would, before the job has waited
    scheduler, template = _choose(options.template)
    command = scheduler.command(options, template, training)
    print(shlex.join(command) + (f" < {shlex.quote(str(template))}" if scheduler.reads_stdin else ""), flush=True)
    if options.show:
        return FINISHED
    if shutil.which(scheduler.program) is None:
        raise HvdDDPError(f"`{scheduler.program}` is not on PATH. Submit where the scheduler is: on a login node.")
    with template.open() as script:
        code = subprocess.run(command, stdin=script if scheduler.reads_stdin else None, check=False).returncode
    return FAILED if code else FINISHED


def _choose(template: Path | None) -> tuple[Scheduler, Path]:
    """The scheduler that is here and its template, or the one that the template is for."""
    if template is not None:
        scheduler = next((row for row in SCHEDULERS if row.ending == template.suffix), None)
        if scheduler is None or not template.is_file():
            what = "no file" if scheduler else "for no scheduler that is known"
            raise HvdDDPError(f"--template `{template}` is {what}. Give one that ends in .sbatch, .pbs or .lsf.")
        return scheduler, template
    scheduler = next((row for row in SCHEDULERS if shutil.which(row.program)), None)
    if scheduler is None:
        programs = ", ".join(row.program for row in SCHEDULERS)
        raise HvdDDPError(f"None of {programs} is on PATH. Submit on a login node, or give --template and --show.")
    paths = [folder / f"train{scheduler.ending}" for folder in TEMPLATES]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise HvdDDPError(f"`{paths[0]}` is not here. Copy it from the repository of hvd_ddp, or give --template.")
    return scheduler, found


def _size(options: Options) -> tuple[int, int] | None:
    """Nodes and ranks on each, which PBS and LSF know only together."""
    if options.nodes is None and options.ranks_per_node is None and options.cores_per_rank is None:
        return None
    if options.nodes is None or options.ranks_per_node is None:
        raise HvdDDPError("--nodes and --ranks-per-node: this scheduler takes both or neither. Give the other one too.")
    return options.nodes, options.ranks_per_node


def _in_one(training: list[str]) -> str:
    """For templates that split a variable at spaces."""
    for word in training:
        if not word or re.search(r"\s", word):
            raise HvdDDPError(f"The option `{word}` has white space, at which the template would cut it. Rename it.")
    return " ".join(training)
