"""bench comm: how fast each backend and transport sums over ranks, against MPI itself."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hvd_ddp.commands.bench_ranks import start
from hvd_ddp.commands.options import command_line
from hvd_ddp.errors import FINISHED, HvdDDPError

if TYPE_CHECKING:
    import torch

    from hvd_ddp.backends.base import Backend

RAW = ("mpi4py", "mpi")
WORK = 64 << 20  # bytes that one turn reduces; small messages: at most MOST of them
FEWEST, MOST = 3, 200  # all_reduces a turn
WARM_UP = 2


@dataclass(frozen=True)
class Options:
    """Measure all_reduce by message size: the sum of float32 in place, as gradients are summed, over the ranks.

    Each backend and transport that works here takes its turn, and mpi4py's Allreduce in place as the limit where MPI
    started the ranks. Bus bandwidth is bytes a second that each rank has to send and to receive at least,
    2 (n - 1) / n of the message.
    """

    nproc: int = 2
    """Ranks to start on this machine, by mpirun if it is there. A launcher's ranks are used as they are."""
    min_bytes: int = 4
    """Smallest message, in bytes."""
    max_bytes: int = 64 << 20
    """Largest message, in bytes. Sizes in between are four times the one before."""
    repeats: int = 7
    """Turns of each; the median counts."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers with which nothing is measured."""
        if not (4 <= self.min_bytes <= self.max_bytes and self.repeats >= 1 and self.nproc >= 2):
            raise ValueError(
                f"--min-bytes is `{self.min_bytes}`, --max-bytes `{self.max_bytes}`, --repeats `{self.repeats}`, "
                f"--nproc `{self.nproc}`: nothing would be measured. Give 4 bytes or more, a repeat and two ranks."
            )


@dataclass
class Way:
    """One backend over one transport, or MPI itself; seconds of an all_reduce of each size, one a repeat."""

    backend: str
    transport: str
    ready: Callable[[], contextlib.AbstractContextManager[Callable[[torch.Tensor], None]]]
    seconds: dict[int, list[float]] = field(default_factory=dict)

    def rows(self, world_size: int) -> list[dict[str, Any]]:
        """For --json: one a size."""
        share = 2 * (world_size - 1) / world_size
        return [
            {
                "backend": self.backend,
                "transport": self.transport,
                "bytes": size,
                "seconds": statistics.median(repeats),
                "bus_bandwidth": share * size / statistics.median(repeats),
                "repeats": repeats,
            }
            for size, repeats in self.seconds.items()
        ]


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp bench comm`."""
    options = command_line(Options, arguments, "bench comm")
    code = start(options.nproc, ["bench", "comm", *arguments])
    if code is not None:
        return code
    from hvd_ddp.backends import connect
    from hvd_ddp.job.health import ends_together

    first = connect(threads=1)
    if first.launch.world_size == 1:
        raise HvdDDPError("One rank has nobody to sum with. Start two or more, or leave --nproc as it is.")
    with ends_together(first.meeting, timeout=300.0):
        ways = measure(first, options)
        if first.is_main:
            show(ways, first, as_json=options.json)
    return FINISHED


def measure(first: Backend, options: Options) -> list[Way]:
    """Each way with its seconds, on every rank."""
    from hvd_ddp.backends import all_here

    with first:
        ways = [Way(backend.name, backend.transport, _of(backend)) for backend in all_here(first)]
        if any(way.transport == "mpi" for way in ways):
            ways.append(Way(*RAW, _raw))
    sizes = [options.min_bytes]
    while sizes[-1] * 4 <= options.max_bytes:
        sizes.append(sizes[-1] * 4)
    for _ in range(options.repeats):
        for way in ways:
            first.meeting.pulse.at(f"measuring {way.backend} over {way.transport}")
            with way.ready() as all_reduce:
                for size in sizes:
                    way.seconds.setdefault(size, []).append(_time(all_reduce, size, first.device))
    return ways


def _time(all_reduce: Callable[[torch.Tensor], None], size: int, device: torch.device) -> float:
    import torch

    tensor = torch.zeros(size // 4, device=device)
    number = max(FEWEST, min(MOST, WORK // size))
    for turn in range(WARM_UP + number):
        if turn == WARM_UP:
            began = time.perf_counter()
        all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / number


def _of(backend: Backend) -> Callable[[], contextlib.AbstractContextManager[Callable[[torch.Tensor], None]]]:
    @contextlib.contextmanager
    def ready() -> Iterator[Callable[[torch.Tensor], None]]:
        with backend:
            yield backend.all_reduce_

    return ready


@contextlib.contextmanager
def _raw() -> Iterator[Callable[[torch.Tensor], None]]:
    from hvd_ddp.backends import mpi

    MPI = mpi.start()
    comm = MPI.COMM_WORLD.Dup()
    yield lambda tensor: comm.Allreduce(MPI.IN_PLACE, tensor.numpy())
    comm.Free()


def show(ways: list[Way], first: Backend, *, as_json: bool) -> None:
    """Print the rows, or a table with a line a size: microseconds and GB/s."""
    rows = [row for way in ways for row in way.rows(first.launch.world_size)]
    if as_json:
        print(json.dumps({"rows": rows}), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    title = f"all_reduce over {first.launch.world_size} ranks, {first.device.type}: microseconds (GB/s of the bus)"
    table = Table(title=title, title_justify="left")
    table.add_column("bytes", justify="right")
    for way in ways:
        table.add_column(f"{way.backend} {way.transport}", justify="right")
    for size in ways[0].seconds:
        cells = [row for row in rows if row["bytes"] == size]
        table.add_row(
            f"{size:,}", *(f"{row['seconds'] * 1e6:,.0f} ({row['bus_bandwidth'] / 1e9:.2f})" for row in cells)
        )
    Console().print(table)
