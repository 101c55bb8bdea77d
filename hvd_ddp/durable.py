"""Files that are on the disk when the call returns."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}


def write_new(path: Path, data: bytes | memoryview) -> None:
    """A file that was not there before. Raises OSError."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes | memoryview) -> None:
    """Write a file so that at any moment either the old or the new one is there, also after a power cut.

    Raises OSError; then nothing has changed.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        write_new(temporary, data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def overwrite(path: Path, data: bytes) -> None:
    """Write over a file in its place: where the disk is full, its own blocks are still there. Raises OSError.

    Not whole or not at all: for a small file whose old content would be worse than none.
    """
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def remove_temporaries(folder: Path) -> None:
    """Delete what writers left that were killed in `replace_file`; only while no other can be at work there."""
    for stale in folder.glob("*.*.tmp"):
        if not stale.name.startswith("lock."):  # of one who waits for its turn
            stale.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Bring the names in `folder` to the disk, where the file system has that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)
