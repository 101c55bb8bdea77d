"""Console, a log file a rank, JSON lines. Only rank 0 has a console and metrics; the others have null objects."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from pathlib import Path
from typing import Any, Protocol

LOGGER = "hvd_ddp"
FORMAT = "%(asctime)s %(levelname)s %(message)s"


class Console(Protocol):
    """What a person watches."""

    def line(self, text: str) -> None:
        """Show one line."""

    def progress(self, step: int, total: int, text: str) -> None:
        """Show how far the training is."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class Silence:
    """The console of every rank but the main one."""

    def line(self, text: str) -> None:
        """Nothing."""

    def progress(self, step: int, total: int, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """Plain lines, for output that goes to a file."""

    def line(self, text: str) -> None:
        """One line with the time."""
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        sys.stdout.flush()

    def progress(self, step: int, total: int, text: str) -> None:
        """One line."""
        self.line(f"step {step}/{total}  {text}")

    def close(self) -> None:
        """Nothing to restore."""


class Bar:
    """A progress bar, for a terminal."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False)
        )
        self._task = self._bar.add_task("", total=None)
        self._bar.start()

    def line(self, text: str) -> None:
        """One line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

    def progress(self, step: int, total: int, text: str) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step, total=total, description=text)

    def close(self) -> None:
        """Take the bar off the screen."""
        self._bar.stop()


def console(*, is_main: bool, behind_mpi: bool) -> Console:
    """A bar where a person looks on, lines where a file does, silence on all other ranks.

    mpirun gives its ranks a terminal of its own even when its own output goes to a file, and may put a tag before
    each line: behind it there are lines.
    """
    if not is_main:
        return Silence()
    return Bar() if sys.stdout.isatty() and not behind_mpi else Lines()


class Metrics:
    """metrics.jsonl: one object a line, appended across restarts. Without a path it writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._begun = False

    def write(self, kind: str, **values: Any) -> None:
        """Append one line. Numbers that JSON has no word for (NaN, infinities) become null."""
        if self._path is None:
            return
        with open(self._path, "a") as file:
            if not self._begun and file.tell() and not self._path.read_bytes().endswith(b"\n"):
                file.write("\n")  # the last start was killed within a line
            self._begun = True
            file.write(json.dumps({"kind": kind, **{name: _plain(value) for name, value in values.items()}}) + "\n")


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def log_to(path: Path) -> logging.Handler:
    """Send the log of this rank to a file; remove the handler with `stop_logging`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(FORMAT))
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    return handler


def stop_logging(handler: logging.Handler) -> None:
    """Close a handler of `log_to`."""
    logging.getLogger(LOGGER).removeHandler(handler)
    handler.close()
