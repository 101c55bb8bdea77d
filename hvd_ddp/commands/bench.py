"""bench: measures a part of hvd_ddp against what else there is. A new one is a file beside this one and a line."""

from __future__ import annotations

import difflib
import json
import statistics
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hvd_ddp.errors import FINISHED, HvdDDPError

BENCHES = {
    "data": "hvd_ddp.commands.bench_data",
    "folder": "hvd_ddp.commands.bench_folder",
    "comm": "hvd_ddp.commands.bench_comm",
    "step": "hvd_ddp.commands.bench_step",
}


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
