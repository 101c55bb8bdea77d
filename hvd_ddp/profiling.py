"""--profile: what each rank does in ten steps, as a file for Perfetto or Chrome's trace viewer."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.profiler import profile, schedule

AFTER, STEPS = 10, 10  # steps: the first ones are slower, and many make a file that no viewer takes


@contextlib.contextmanager
def profiled(path: Path | None) -> Iterator[Callable[[], None]]:
    """Yields what is called after each step. Without a path nothing is recorded; a shorter run leaves no file."""
    if path is None:
        yield lambda: None
        return

    def write(finished: profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # the profiler would write through a link
            whole = Path(folder, path.name)
            finished.export_chrome_trace(str(whole))
            os.replace(whole, path)

    with profile(schedule=schedule(wait=AFTER, warmup=1, active=STEPS, repeat=1), on_trace_ready=write) as running:
        yield running.step
