"""data: what data sets there are; download, pack and verify one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from hvd_ddp.commands.options import command_line
from hvd_ddp.errors import FINISHED

if TYPE_CHECKING:
    from hvd_ddp.data.packed import Progress


@dataclass(frozen=True)
class List:
    """Show what --data takes."""

    data_dir: Path | None = None
    """Say also what is packed in this folder."""


@dataclass(frozen=True)
class Prepare:
    """Download a data set if need be, pack it into memory-mapped arrays, and verify them.

    Once for all ranks and jobs. Train packs by itself what it finds, but it never downloads.
    """

    name: tyro.conf.Positional[str]
    """Name of the data set, as for --data of train."""
    data_dir: Path | None = None
    """Folder of the data set's files; the packed form comes to stand in it, as NAME.packed."""


Options: dict[str, type[List | Prepare]] = {"list": List, "prepare": Prepare}


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp data`."""
    options = command_line(Options, arguments, "data")
    return _list(options) if isinstance(options, List) else _prepare(options)


def _list(options: List) -> int:
    from hvd_ddp.data import datasets, packed

    rows = {name: source.about for name, source in datasets.DATASETS.items()} | datasets.FORMS
    width = max(map(len, rows))
    for name, about in rows.items():
        print(f"{name:{width}}  {about}")
    if options.data_dir is not None:
        for path in sorted(options.data_dir.glob("*.packed")):
            manifest = packed.read_manifest(path) or {}
            print(f"{path}: {manifest.get('name')}, packed")
    return FINISHED


def _prepare(options: Prepare) -> int:
    from hvd_ddp.data import datasets, packed

    with _bar() as progress:
        data, done = datasets.prepare(options.name, options.data_dir, progress)
    shape = "x".join(map(str, data.image_shape))
    where = ""
    if options.data_dir is not None and datasets.find(options.name).packs:
        where = f"; {packed.path_of(options.name, options.data_dir)}"
    print(
        f"{options.name}: {done}; {' + '.join(map(_length, (data.train, data.eval)))} samples of {shape}, "
        f"{'targets that are no' if data.num_classes is None else data.num_classes} classes{where}"
    )
    return FINISHED


def _length(part: object) -> str:
    return str(len(part)) if isinstance(part, Sized) else "any number of"


@contextmanager
def _bar() -> Iterator[Progress]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as bar:
        tasks = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield show
