"""parity: the same steps under each backend and transport that is here, in fresh processes, compared step by step."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import yaml

from hvd_ddp.backends import BACKENDS, why_not
from hvd_ddp.commands.parity_judge import Row, Trace, judge, read_trace
from hvd_ddp.commands.starters import Ended, mpirun, outside, run_to_the_end
from hvd_ddp.commands.train import config_of, parse_as
from hvd_ddp.config import TrainConfig, TransportName, free
from hvd_ddp.errors import FAILED, FINISHED, USER_ERROR, HvdDDPError, RankFailedError
from hvd_ddp.job.launch import Launch
from hvd_ddp.job.spawn import command as spawned

STEPS, RANKS = 30, 2
ONE_PROCESS = "local"

DESCRIPTION = """Train the same steps of your model and data under each backend and transport that is here, and compare.

Takes all options of train; --backend and --transport leave out others, --max-steps is 30 and --nproc 2 unless you say
otherwise. Every way trains in fresh processes on this machine. After each step its parameters, buffers, loss and the
samples that the model was shown are compared with those of the first way, which keeps a copy of the weights for each
step in the working directory meanwhile. Exit code 1 where they differ.

Differences are norm(a - b) / norm(b), the largest of a tensor in a step. Up to two ranks on CPUs must agree to the last
bit, in any precision. Other sums come in another order: of more ranks, of GPUs, of one process (local). They must agree
within 1e-12 with --precision fp64, the strict form, within 1e-5 in fp32 with sgd; else they are shown, not judged."""


@dataclass(frozen=True)
class Options(TrainConfig):
    """Options that are not part of the run."""

    nproc: int | None = free(RANKS)
    """Ranks to start on this machine for each way."""
    max_steps: int | None = free(STEPS)
    """Optimizer steps of each way."""
    config: Path | None = None
    """As for train."""
    tolerance: float | None = None
    """Judge by this instead: the largest norm(a - b) / norm(b) that is no failure. None: as said above."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        """Raise ValueError for values that can't work."""
        super().__post_init__()
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ValueError(f"--tolerance is `{self.tolerance}`. Give a number from 0 up.")


@dataclass(frozen=True)
class Way:
    """A backend over a transport, and the ranks that it has here."""

    backend: str
    transport: str
    num_ranks: int

    @property
    def name(self) -> str:
        return self.backend if self.backend == ONE_PROCESS else f"{self.backend} over {self.transport}"


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp parity`."""
    if arguments[:1] == ["rank"]:
        from hvd_ddp.commands import parity_rank

        return parity_rank.run(arguments[1:])
    outside("parity")
    options = parse_as(Options, arguments, "parity", description=DESCRIPTION)
    ways, missing = _ways(options)
    try:
        with tempfile.TemporaryDirectory(prefix=".parity-", dir=Path.cwd()) as folder:
            rows = _compare(options, ways, Path(folder))
    except OSError as error:
        raise HvdDDPError(
            f"`{error.filename or Path.cwd()}` can't be written: {error.strerror}. Start where there is room."
        ) from error
    if not any(row.judged for row in rows[1:]):
        _show(options, rows, missing)
        raise HvdDDPError(
            f"{rows[0].name} is here, but nothing that would have to agree with it in {options.precision}: nothing is "
            "proved. Use --precision fp64, by which one process is judged too, or give a --tolerance."
        )
    _show(options, rows, missing)
    return FINISHED if all(row.equal for row in rows) else FAILED


def _ways(options: Options) -> tuple[list[Way], dict[str, str]]:
    """Those that are here, and why others are not. One process comes last, to be compared with the first."""
    num_ranks, mpi = options.nproc or RANKS, mpirun()
    found, missing = [], dict[str, str]()
    for backend in (name for name in BACKENDS if name != ONE_PROCESS and options.backend in ("auto", name)):
        for transport in get_args(TransportName)[1:]:
            way = Way(backend, transport, num_ranks)
            if options.transport not in ("auto", transport):
                continue
            if transport == "mpi" and mpi is None:
                missing[way.name] = "No mpirun of the MPI that mpi4py loads is on PATH."
                continue
            launch = Launch(launcher="openmpi", mpi=mpi[1]) if transport == "mpi" and mpi else Launch()
            reason = why_not(backend, transport, options.device, launch)
            if reason is None:
                found.append(way)
            else:
                missing[way.name] = reason
    if not found:
        raise HvdDDPError(f"Nothing to compare: {' '.join(missing.values())}")
    return [*found, Way(ONE_PROCESS, "none", 1)], missing


def _compare(options: Options, ways: list[Way], folder: Path) -> list[Row]:
    """A row for each way; the first is what the others are compared with."""
    rows = list[Row]()
    reference: Trace | None = None
    for way in ways:
        print(f"{way.name}, {way.num_ranks} rank(s) ...", file=sys.stderr, flush=True)
        notes = folder / f"{way.backend}-{way.transport}"
        ended = _train(options, way, notes, folder / f"{ways[0].backend}-{ways[0].transport}")
        if reference is None:
            if ended.code == USER_ERROR:
                raise HvdDDPError(ended.said)
            if ended.code:
                raise RankFailedError(f"{way.name} failed, with which the others would be compared: {ended.said}")
            reference = read_trace(notes, notes / "run")
            rows.append(Row(way.name, way.backend, way.transport, way.num_ranks, is_reference=True))
        elif ended.code:
            rows.append(Row(way.name, way.backend, way.transport, way.num_ranks, error=ended.said))
        else:
            trace = read_trace(notes, notes / "run")
            empty = Row(way.name, way.backend, way.transport, way.num_ranks)
            limit, same = _limit(options, way, reference, ways[0]), way.num_ranks == ways[0].num_ranks
            rows.append(judge(empty, trace, reference, limit, same_shares=same))
    return rows


def _train(options: Options, way: Way, notes: Path, reference: Path) -> Ended:
    """Its steps in fresh processes."""
    notes.mkdir()
    config = config_of(
        options,
        backend=way.backend, transport="auto" if way.backend == ONE_PROCESS else way.transport,
        nproc=None, max_steps=options.max_steps or STEPS, run_dir=notes / "run", log_every=1, keep=1, check_replicas=1,
    )  # fmt: skip
    path = notes / "options.yaml"
    path.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))
    arguments = ["parity", "rank", str(path), str(notes), str(reference)]
    command = spawned(way.num_ranks, "hvd_ddp", arguments)
    if way.transport == "mpi" and (mpi := mpirun()) is not None:
        command = [mpi[0], "-np", str(way.num_ranks), "--oversubscribe", sys.executable, "-m", "hvd_ddp", *arguments]
    return run_to_the_end(command, notes / "log")


def _limit(options: Options, way: Way, reference: Trace, first: Way) -> float | None:
    """The largest difference that is no failure; None where none is promised."""
    if options.tolerance is not None:
        return options.tolerance
    if options.compression != "none" or options.adasum:
        return None  # each backend rounds in its own way, or combines otherwise
    if reference.device == "cpu" and way.num_ranks == first.num_ranks <= 2:
        return 0.0  # a + b is b + a
    if options.precision == "fp64":
        return 1e-12
    return 1e-5 if (options.precision, options.optimizer) == ("fp32", "sgd") else None


def _show(options: Options, rows: list[Row], missing: dict[str, str]) -> None:
    if options.json:
        equal = all(row.equal for row in rows) and any(row.judged for row in rows[1:])
        print(json.dumps({"rows": [row.to_dict() for row in rows], "not_here": missing, "equal": equal}), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    steps = options.max_steps or STEPS
    print(f"{options.data}, {options.model}, {options.precision}, {steps} steps: differences to {rows[0].name}")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("", "ranks", "weights", "buffers", "loss", "samples", ""):
        table.add_column(column, justify="left" if column in ("", "samples") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.cells())
    Console().print(table)
    notes = {row.name: row.in_words() for row in rows if row.in_words()}
    for name, words in [*notes.items(), *((name, f"not here. {why}") for name, why in missing.items())]:
        print(f"{name}: {words}", flush=True)
