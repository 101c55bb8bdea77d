"""Console, a log file a rank, JSON lines. Only rank 0 has a console and metrics; the others have null objects."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Protocol

from hvd_ddp.durable import open_own

LOGGER = "hvd_ddp"
FORMAT = "%(asctime)s %(levelname)s %(message)s"
MOST_WAITING = 10_000  # lines of metrics that memory keeps for a full disk


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
    """A progress bar with the time left, for a terminal; below it what else there is to say, as far as it fits."""

    def __init__(self) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.text import Text

        self._bar = Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left"))
        self._task = self._bar.add_task("", total=None)
        self._text = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bar, self._text))
        self._live.start()

    def line(self, text: str) -> None:
        """One line above the bar."""
        self._live.console.print(text, markup=False, highlight=False)

    def progress(self, step: int, total: int, text: str) -> None:
        """Move the bar."""
        self._text.plain = text
        self._bar.update(self._task, completed=step, total=total)

    def close(self) -> None:
        """Leave the bar where it is, and the cursor below it."""
        self._live.stop()


def console(*, is_main: bool, behind_mpi: bool) -> Console:
    """A bar where a person looks on, lines where a file does, silence on all other ranks.

    mpirun gives its ranks a terminal of its own even when its own output goes to a file, and may put a tag before
    each line: behind it there are lines.
    """
    if not is_main:
        return Silence()
    return Bar() if sys.stdout.isatty() and not behind_mpi else Lines()


class Metrics:
    """metrics.jsonl: one object a line, appended across restarts. Without a path it writes nothing.

    Lines that can't be written wait in memory for those that can: a full disk ends no training. `guard` is called
    before each write and may raise; `complain` is told when lines begin to wait. Any thread may write.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        guard: Callable[[], None] = lambda: None,
        complain: Callable[[OSError], None] = lambda error: None,
    ) -> None:
        self._path, self._guard, self._complain = path, guard, complain
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING)
        self._begun = self._made = self._fails = False
        self._lock = threading.Lock()

    def write(self, kind: str, **values: Any) -> None:
        """Append one line. Numbers that JSON has no word for (NaN, infinities) become null."""
        if self._path is None:
            return
        line = json.dumps({"kind": kind, **{name: _plain(value) for name, value in values.items()}}) + "\n"
        with self._lock:
            self._waiting.append(line)
            try:
                self._guard()
                self._append(self._path, "".join(self._waiting).encode())
            except OSError as error:
                if not self._fails:
                    self._complain(error)
                self._fails = True
            else:
                self._fails = False
                self._waiting.clear()

    @property
    def num_waiting(self) -> int:
        """Lines that are not in the file."""
        return len(self._waiting)

    def _append(self, path: Path, data: bytes) -> None:
        """All or nothing, as far as the file system lets us; makes the file once only. Raises OSError."""
        flags = os.O_RDWR | os.O_APPEND | (0 if self._made else os.O_CREAT)
        begun, self._begun = self._begun, False
        with open(open_own(path, flags), "ab", buffering=0) as file:
            self._made = True  # if it is gone later, then with the disk that it was on
            size = file.seek(0, os.SEEK_END)
            if not begun and size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                data = b"\n" + data  # the last start was killed within a line
            if file.write(data) != len(data):
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._begun = True


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _LogFile(logging.FileHandler):
    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return open(open_own(Path(self.baseFilename), flags), "a", encoding="utf-8", errors="backslashreplace")

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk costs log lines; the console has them too."""


def log_to(path: Path) -> logging.Handler:
    """Send the log of this rank to a file; remove the handler with `stop_logging`. Where that can't be, to nobody."""
    handler: logging.Handler
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path)
    except OSError:
        handler = logging.NullHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    return handler


def stop_logging(handler: logging.Handler) -> None:
    """Close a handler of `log_to`."""
    logging.getLogger(LOGGER).removeHandler(handler)
    with contextlib.suppress(OSError):
        handler.close()
