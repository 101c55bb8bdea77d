"""Disks that are full or can't be written, not even by root; to mount them takes root, as tests/cluster does."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def disk(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 kB."""
    with disk(tmp_path / "tiny", "size=100k") as path:
        yield path


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A file system that root can't write either."""
    with disk(tmp_path / "read_only", "ro") as path:
        yield path
