"""scaling --simulate: what was worked out, as a table, as CSV and for programs."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_ddp.costs import ALL_REDUCE, Costs, Link, exposed_on

SIZES = [1 << number for number in range(13)]  # ranks
SHOWN = (2, 32, 512, 4096)  # of them, in the table
COLUMNS = ("model", "samples_per_rank", "gradient_bytes", "gbit_per_second", "all_reduce", "ranks", "step_seconds",
           "exposed_seconds", "efficiency")  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One model, one link, one way to reduce, one number of ranks."""

    costs: Costs
    gbit: float
    algorithm: str
    ranks: int
    exposed: float  # seconds of a step

    @property
    def efficiency(self) -> float:
        """Samples a second a rank, over those of one rank; each rank keeps its number of samples."""
        return self.costs.step / (self.costs.step + self.exposed)

    def to_dict(self) -> dict[str, Any]:
        """By COLUMNS."""
        values = (self.costs.model, self.costs.samples, self.costs.size, self.gbit, self.algorithm, self.ranks,
                  self.costs.step + self.exposed, self.exposed, self.efficiency)  # fmt: skip
        return dict(zip(COLUMNS, values, strict=True))


def points(models: Sequence[Costs], links: dict[float, Link], bucket: int | None) -> list[Point]:
    """All of them, in the order of the table; `links` by their rates in Gbit/s."""
    return [
        Point(costs, gbit, algorithm, ranks, exposed_on(costs, ranks, link, algorithm, bucket))
        for costs in models
        for gbit, link in links.items()
        for algorithm in ALL_REDUCE
        for ranks in SIZES
    ]


def as_csv(found: Sequence[Point]) -> str:
    """A line each, COLUMNS in the first."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for point in found:
        row = point.to_dict().items()
        writer.writerow({name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row})
    return file.getvalue()


def show(found: Sequence[Point]) -> None:
    """Print what each model costs, and under it a line for each link and way to reduce."""
    from rich.console import Console
    from rich.table import Table

    for model in dict.fromkeys(point.costs for point in found):
        print(f"{recorded(model)}\nefficiency in %, and communication that is exposed, in ms a step:")
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for column in ("Gbit/s", "by", *(f"{ranks:,} ranks" for ranks in SHOWN)):
            table.add_column(column, justify="left" if column == "by" else "right", no_wrap=True)
        own = [point for point in found if point.costs == model]
        for gbit, algorithm in dict.fromkeys((point.gbit, point.algorithm) for point in own):
            line = [point for point in own if (point.gbit, point.algorithm) == (gbit, algorithm)]
            cells = [f"{100 * p.efficiency:.1f} {1000 * p.exposed:8,.1f}" for p in line if p.ranks in SHOWN]
            table.add_row(f"{gbit:g}", algorithm, *cells)
        Console().print(table)


def recorded(costs: Costs) -> str:
    """What it starts from."""
    return (
        f"{costs.model}: {costs.samples} samples a rank, {1000 * costs.step:,.1f} ms a step, of which backward takes "
        f"{1000 * costs.backward:,.1f} ms; {costs.size / 1e6:.4g} MB of gradients\n({costs.about})"
    )


def assumptions(link: Link, bucket: int | None) -> str:
    """What the numbers hold under."""
    sizes = "of 1 MiB, then of 25 MiB" if bucket is None else f"of {bucket / (1 << 20):g} MiB"
    return textwrap.fill(
        "Weak scaling: each rank has as many samples as the one that was recorded, computes as fast, and waits neither "
        "for data nor for slower ranks. It has a link of its own, which goes both ways at once and carries nothing "
        f"else: {1e6 * link.latency:g} us a message, {100 * link.goodput:g} % of its rate for gradients. DDP's buckets "
        f"{sizes}, are reduced one after the other. ring: 2(p-1) messages of 1/p of a bucket. tree: up and then down "
        f"two binary trees, pipelined. Adding what came in, and {1e9 * link.host:g} ns for each byte sent, take the "
        "rank's own core from backward, and set the pace where the link is faster; all else on the way does not.",
        width=118,
    )
