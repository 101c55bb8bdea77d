"""What metrics.jsonl tells of a run, and how runs are told apart."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvd_ddp.config import may_change
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.outside import from_json, from_yaml, open_regular
from hvd_ddp.outside import read as read_file

Row = dict[str, Any]
# By which runs are told apart, the likeliest first; all other options of config.yaml follow.
FACTS = ("backend", "world_size", "transport", "device", "launcher", "threads")
NEVER = ("run_dir", "resume", "nproc", "data_dir", "stage")  # options that say where, not what
MOST = 1 << 62  # steps and other numbers: more overflow somewhere, and NaN is no number to draw
MOST_BYTES = 1 << 30  # of metrics.jsonl
MOST_WORDS = 3  # of a name; beyond, directories are easier to read


@dataclass
class History:
    """A run so far. Rows are in the order of steps, one a step; numbers may be None where they were not finite."""

    directory: Path
    facts: Row = field(default_factory=dict)  # of its last start, and the options of config.yaml
    train: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    steps_per_epoch: float | None = None  # None while no row tells


def read(directory: Path) -> History:
    """Read a run directory, also of a run that goes on. Lines that a kill has cut are passed over.

    Raises HvdDDPError where there is no run, or nothing to draw of it yet.
    """
    path = directory / "metrics.jsonl"
    try:
        with open_regular(path) as file:
            lines = file.read(MOST_BYTES).decode(errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        what = "has no metrics.jsonl" if directory.is_dir() else "is no directory"
        raise HvdDDPError(f"`{directory}` {what}: it is no run. Give a run directory, as train names it.") from None
    except OSError as error:
        raise HvdDDPError(f"`{path}` can't be read: {error.strerror}. Give a run that you may read.") from error
    rows = [row for row in map(_row, lines) if row is not None]
    if lines and not rows:
        raise HvdDDPError(f"`{path}` has no line that train wrote: it is no run. Give a run directory.")
    train, evaluations = _lived(rows, "train"), _lived(rows, "eval")
    if not train and not evaluations:
        raise HvdDDPError(f"`{path}` tells of no step yet: there is nothing to draw. Wait for its first --log-every.")
    return History(directory, _facts(directory, rows), train, evaluations, _steps_per_epoch(rows))


def _row(line: str) -> Row | None:
    try:
        row = from_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        return None
    return {name: value for name, value in row.items() if not isinstance(value, int | float) or abs(value) < MOST}


def _lived(rows: list[Row], kind: str) -> list[Row]:
    """Rows of this kind. What came after the checkpoint that a resume went back to is not part of the run."""
    found: dict[int, Row] = {}
    for row in rows:
        step = row.get("step")
        if not isinstance(step, int):
            continue
        if row["kind"] == "resume":
            found = {before: kept for before, kept in found.items() if before <= step}
        elif row["kind"] == kind:
            found[step] = {name: value for name, value in row.items() if isinstance(value, int | float | None)}
    return [found[step] for step in sorted(found)]


def _facts(directory: Path, rows: list[Row]) -> Row:
    try:
        options = from_yaml(read_file(directory / "config.yaml"))
    except (OSError, ValueError):  # the curves do not need it
        options = {}
    starts = [row for row in rows if row["kind"] == "start"] or [{}]
    items = options.items() if isinstance(options, dict) else ()  # aliases make lists that nobody lives to see printed
    options = {str(name): value for name, value in items if isinstance(value, bool | int | float | str | None)}
    return {**options, **{name: starts[-1][name] for name in FACTS if name in starts[-1]}}


def _steps_per_epoch(rows: list[Row]) -> float | None:
    """From the end, which says both; else step s is in epoch (s - 1) // n: n lies between these bounds."""
    for row in reversed(rows):
        steps, epochs = row.get("steps"), row.get("epochs")
        if row["kind"] == "end" and isinstance(steps, int) and isinstance(epochs, int | float) and epochs > 0:
            return steps / epochs
    places = [
        (row["step"], row["epoch"]) for row in rows if all(isinstance(row.get(n), int) for n in ("step", "epoch"))
    ]
    if not any(epoch > 0 for _, epoch in places):
        return None
    return float(max(math.ceil(step / (epoch + 1)) for step, epoch in places))


def names(histories: list[History]) -> list[str]:
    """A short name for each run: what differs between them in words, or else its directory."""
    if len(histories) == 1:
        known = [_word(name, histories[0].facts[name]) for name in FACTS[:2] if name in histories[0].facts]
        return [", ".join(known)] if known else _directories([histories[0].directory])
    fields = dict.fromkeys(name for history in histories for name in (*FACTS, *history.facts) if name not in NEVER)
    differing = [name for name in fields if len({str(history.facts.get(name)) for history in histories}) > 1]
    telling = [name for name in differing if name in FACTS[:2] or (name not in FACTS and not may_change(name))]
    spare = [name for name in differing if name not in telling]  # such as the transport, which follows from the backend
    for number in range(len(spare) + 1):
        chosen = telling + spare[:number]
        words = [", ".join(_word(name, history.facts.get(name)) for name in chosen) for history in histories]
        if len(set(words)) == len(histories) and len(chosen) <= MOST_WORDS:
            return words
    return _directories([history.directory for history in histories])


def _word(name: str, value: Any) -> str:
    if name == "world_size":
        return f"{value} rank" + ("" if value == 1 else "s")
    return str(value) if name in FACTS[:4] else f"{name.replace('_', '-')} {value}"


def _directories(paths: list[Path]) -> list[str]:
    """The last parts of each path, as many as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for number in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-number:]) for part in parts]
        if len(set(found)) == len(paths):
            return found
    return [str(path) for path in paths]
