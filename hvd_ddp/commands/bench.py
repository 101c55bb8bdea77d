"""bench: measures a part of hvd_ddp against what else there is. A new one is a file beside this one and a line."""

from __future__ import annotations

import difflib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hvd_ddp.errors import FINISHED, HvdDDPError

BENCHES = {
    "data": "hvd_ddp.commands.bench_data",
    "folder": "hvd_ddp.commands.bench_folder",
    "comm": "hvd_ddp.commands.bench_comm",
    "step": "hvd_ddp.commands.bench_step",
    "start": "hvd_ddp.commands.bench_start",
    "peers": "hvd_ddp.commands.bench_peers",
}
# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
           12: 2.179, 14: 2.145, 16: 2.120, 18: 2.101, 20: 2.086, 25: 2.060, 30: 2.042, 40: 2.021,
           60: 2.000}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One thing measured: `repeats` are its figures, of which the median counts."""

    name: str
    figure: str  # what a repeat is, with its unit: images_per_second
    repeats: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.repeats)

    def to_dict(self) -> dict[str, Any]:
        """For --json: the name, the median under the figure's name, the repeats."""
        return {"name": self.name, self.figure: self.median, "repeats": self.repeats}


def ratio(first: Sequence[float], second: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """How many times the second the first is, turn by turn: the geometric mean, and its 95 % interval (Student's t)."""
    logs = [math.log(one / other) for one, other in zip(first, second, strict=True)]
    mean, number = statistics.mean(logs), len(logs)
    quantile = next(value for freedom, value in reversed(STUDENT.items()) if freedom <= number - 1)
    half = quantile * statistics.stdev(logs) / math.sqrt(number)
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp bench`."""
    choices = ", ".join(BENCHES)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m hvd_ddp bench NAME [OPTIONS]\n\nNAME is one of: {choices} (each with --help).")
        return FINISHED
    name, *options = arguments
    if name not in BENCHES:
        near = difflib.get_close_matches(name, BENCHES, 1)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise HvdDDPError(f"`{name}` is nothing that can be measured.{guess} Use bench with one of: {choices}.")
    code: int = import_module(BENCHES[name]).run(options)
    return code


def show(rows: list[Row], *, title: str, as_json: bool, **further: Any) -> None:
    """Print the rows: as one JSON object with what is `further` in it, or as a table."""
    if as_json:
        print(json.dumps({"rows": [row.to_dict() for row in rows], **further}), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("", rows[0].figure.replace("_", " "), f"to {rows[0].name}", "repeats, low to high"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        spread = f"{_short(min(row.repeats))} to {_short(max(row.repeats))}"
        table.add_row(row.name, _short(row.median), f"{row.median / rows[0].median:.2f}", spread)
    Console().print(table)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
