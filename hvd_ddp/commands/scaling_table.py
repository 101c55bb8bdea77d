"""scaling: what was measured, as a table, as CSV and for programs."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_ddp.errors import HvdDDPError

COLUMNS = ("mode", "backend", "transport", "ranks", "hosts", "threads", "global_batch", "samples_per_second",
           "efficiency", "lowest", "highest", "repeats", "error")  # fmt: skip


@dataclass
class Cell:
    """One backend on so many ranks: samples a second of each repeat, or why one failed."""

    backend: str
    num_ranks: int
    speeds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # of its last start

    @property
    def name(self) -> str:
        return f"{self.backend} on {self.num_ranks} rank" + ("" if self.num_ranks == 1 else "s")

    @property
    def speed(self) -> float:
        """The median of the repeats; only where there are some."""
        return statistics.median(self.speeds)

    def take(self, metrics: str, *, after: int) -> None:
        """Count a run by its metrics.jsonl: the median of its intervals after that step."""
        rows = [json.loads(line) for line in metrics.splitlines()]
        self.facts = next(row for row in rows if row["kind"] == "start")
        figures = [row["samples_per_second"] for row in rows if row["kind"] == "train" and row["step"] > after]
        self.speeds.append(statistics.median(figures))

    def to_dict(self, efficiency: float | None) -> dict[str, Any]:
        """For --json and CSV: None where nothing was measured."""
        return {
            "backend": self.backend,
            "transport": self.facts.get("transport"),
            "ranks": self.num_ranks,
            "hosts": len(self.facts["hosts"]) if self.facts else None,
            "threads": self.facts.get("threads"),
            "global_batch": self.facts.get("global_batch"),
            "samples_per_second": self.speed if self.speeds else None,
            "efficiency": efficiency,
            "repeats": self.speeds,
            "error": self.errors[0] if self.errors else None,
        }


def efficiencies(cells: list[Cell]) -> list[tuple[Cell, float | None]]:
    """Samples a second a rank, over those of the same backend's cell with the fewest ranks that was measured."""
    found = list[tuple[Cell, float | None]]()
    for cell in cells:
        measured = [other for other in cells if other.backend == cell.backend and other.speeds]
        fewest = min(measured, key=lambda other: other.num_ranks, default=cell)
        share = (cell.speed / cell.num_ranks) / (fewest.speed / fewest.num_ranks) if cell.speeds else None
        found.append((cell, share))
    return found


def as_csv(cells: list[Cell], mode: str) -> str:
    """A line a cell, COLUMNS in the first; numbers are empty where nothing was measured."""
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for cell, efficiency in efficiencies(cells):
        spread = {"lowest": min(cell.speeds), "highest": max(cell.speeds)} if cell.speeds else {}
        row = {"mode": mode, **cell.to_dict(efficiency), **spread, "repeats": len(cell.speeds)}
        writer.writerow({name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()})
    return file.getvalue()


def refuse_other_csv(path: Path, columns: Sequence[str] = COLUMNS) -> None:
    """Only what this command may have written is replaced; HvdDDPError for anything else of that name."""
    try:
        with path.open(errors="replace") as file:
            start = file.readline(1000)
    except FileNotFoundError:
        return
    except OSError as error:
        raise HvdDDPError(f"`{path}` can't be replaced: {error.strerror}. Give another --output.") from error
    if start and start.rstrip("\n") != ",".join(columns):
        raise HvdDDPError(f"`{path}` is there and is no table of scaling: it is not replaced. Give another --output.")


def show(cells: list[Cell], title: str) -> None:
    """Print the table, and below it why runs failed."""
    from rich.console import Console
    from rich.table import Table

    print(title)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("backend", "transport", "ranks", "hosts", "samples/s", "repeats, low to high", "efficiency"):
        table.add_column(column, justify="left" if column in ("backend", "transport") else "right", no_wrap=True)
    for cell, efficiency in efficiencies(cells):
        row = cell.to_dict(efficiency)
        words = [cell.backend, row["transport"] or "", str(cell.num_ranks), str(row["hosts"] or "")]
        if efficiency is None:
            table.add_row(*words, "failed", "", "")
        else:
            spread = f"{min(cell.speeds):,.0f} to {max(cell.speeds):,.0f}"
            table.add_row(*words, f"{cell.speed:,.0f}", spread, f"{100 * efficiency:.0f} %")
    Console().print(table)
    for cell in cells:
        for error in cell.errors:
            print(f"{cell.name} failed after {len(cell.speeds)} repeats: {error}", flush=True)
