"""Disks that are full or can't be written, not even by root; to mount them takes root, as tests/cluster does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import disk


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
