"""bench start: what the trainer costs before the first step, and in memory, against a script written by hand."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvd_ddp.commands.bench import ratio
from hvd_ddp.commands.options import command_line
from hvd_ddp.commands.starters import last_words, mpirun, outside
from hvd_ddp.errors import FINISHED, RankFailedError

STEPS = 20  # of a turn; memory has its peak by then
FIRST = re.compile(rb"\bstep 1\b")
TRAIN = ["hvd_ddp", "train", "--threads", "1", "--max-steps", str(STEPS), "--log-every", "1"]
SCRIPT = "hvd_ddp.commands.bench_script"


@dataclass(frozen=True)
class Options:
    """Measure the seconds from the command to the line that tells of the first optimizer step, and the peak memory of
    the largest rank in a training of 20 steps: `train` as it is by default, digits and the small CNN, against a script
    of some forty lines that does the same, written for DDP and for Horovod.

    Both are started alike, in new processes for each turn: by torchrun, and by mpirun if it is there (DDP over gloo,
    for a script has no MPI; Horovod over MPI). They take turns. The ratio is the mean over the turns, with its 95 %
    interval.
    """

    nproc: int = 2
    """Ranks to start on this machine."""
    repeats: int = 5
    """Turns of each; the median counts."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers with which nothing is measured."""
        if not (self.nproc >= 2 and self.repeats >= 2):
            raise ValueError(
                f"--nproc is `{self.nproc}`, --repeats `{self.repeats}`: nothing would be measured. Give two ranks "
                "and, for an interval, two repeats."
            )


@dataclass
class Program:
    """A training, by what starts its ranks and what moves its gradients; seconds and MB of each turn."""

    launcher: str
    backend: str
    transport: str
    start: list[str]  # python on each rank
    by_hand: bool
    seconds: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """In words."""
        who = "by hand" if self.by_hand else "hvd_ddp"
        return f"{who}, {self.backend} {self.transport}, {self.launcher}"

    def turn(self, folder: Path) -> None:
        """Run it once, with that empty folder of its own. Raises RankFailedError where it fails."""
        way = ["--backend", self.backend, "--transport", self.transport, "--run-dir", str(folder / "run")]
        program = [SCRIPT, self.backend, str(STEPS), str(folder / "store")] if self.by_hand else [*TRAIN, *way]
        with (folder / "err").open("w+b") as err:
            began = time.perf_counter()
            process = subprocess.Popen([*self.start, "-m", *program], stdout=subprocess.PIPE, stderr=err)
            assert process.stdout is not None
            times = [time.perf_counter() - began for line in process.stdout if FIRST.search(line)]
            # Of the largest of all processes that it waited for: a rank. A fork of this one counts, which has no torch.
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            err.seek(0)
            said = last_words(err.read().decode(errors="replace"), process.returncode)
        if process.returncode or not times:
            raise RankFailedError(f"{self.name} failed: {said} Nothing can be compared.")
        self.seconds.append(times[0])
        self.megabytes.append(used.ru_maxrss * 1024 / 1e6)

    def to_dict(self) -> dict[str, Any]:
        """For --json: the medians, and the figures of each turn."""
        return {
            "name": self.name,
            "seconds": statistics.median(self.seconds),
            "peak_megabytes": statistics.median(self.megabytes),
            "repeats": self.seconds,
            "peak_megabytes_repeats": self.megabytes,
        }


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp bench start`."""
    outside("bench start")
    options = command_line(Options, arguments, "bench start")
    pairs = _pairs(options.nproc)
    for number in range(options.repeats):
        for program in [program for pair in pairs for program in (pair if number % 2 else reversed(pair))]:
            with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder:
                program.turn(Path(folder))
    _show(pairs, options)
    return FINISHED


def _pairs(nproc: int) -> list[tuple[Program, Program]]:
    """Ours and the script beside it, by each launcher and backend that is here."""
    number, mpi = str(nproc), mpirun()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", number]
    ways = [("torchrun", "ddp", "gloo", torchrun)]
    if mpi is not None:
        start = [mpi[0], "-np", number, "--oversubscribe", "--bind-to", "none", sys.executable]
        ways.append(("mpirun", "ddp", "gloo", start))
        if find_spec("horovod") is not None:
            ways.append(("mpirun", "horovod", "mpi", start))
    return [(Program(*way, by_hand=False), Program(*way, by_hand=True)) for way in ways]


def _show(pairs: list[tuple[Program, Program]], options: Options) -> None:
    ratios: list[dict[str, Any]] = [
        {
            "launcher": ours.launcher,
            "backend": ours.backend,
            "seconds_to_by_hand": time_ratio,
            "seconds_to_by_hand_interval": interval,
            "peak_megabytes_to_by_hand": statistics.median(ours.megabytes) / statistics.median(script.megabytes),
        }
        for ours, script in pairs
        for time_ratio, interval in [ratio(ours.seconds, script.seconds)]
    ]
    if options.json:
        print(
            json.dumps({"rows": [program.to_dict() for pair in pairs for program in pair], "ratios": ratios}),
            flush=True,
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"from the command to the first step, {options.nproc} ranks", title_justify="left")
    for column in ("", "seconds", "low to high", "MB of a rank"):
        table.add_column(column, justify="right" if column else "left")
    for program in [program for pair in pairs for program in pair]:
        row, spread = program.to_dict(), f"{min(program.seconds):.2f} to {max(program.seconds):.2f}"
        table.add_row(program.name, f"{row['seconds']:.2f}", spread, f"{row['peak_megabytes']:,.0f}")
    Console().print(table)
    for (ours, script), found in zip(pairs, ratios, strict=True):
        low, high = found["seconds_to_by_hand_interval"]
        print(
            f"{ours.name} to {script.name}: {found['seconds_to_by_hand']:.3f} ({low:.3f} to {high:.3f}, 95 % of paired "
            f"turns), memory {found['peak_megabytes_to_by_hand']:.3f}"
        )
