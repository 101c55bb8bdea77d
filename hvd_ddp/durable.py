"""Files that are on the disk when the call returns."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
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
    with os.fdopen(open_own(path, os.O_WRONLY), "wb") as file:
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def open_own(path: Path, flags: int) -> int:
    """The descriptor of a regular file, to be written with `flags` of os.open. Raises OSError.

    Also where it is a link, by which another could let us write elsewhere, or a pipe, which would let us wait.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return descriptor


def remove_temporaries(folder: Path) -> None:
    """Delete what writers left that were killed in `replace_file`; only while no other can be at work there."""
    for stale in folder.glob("*.*.tmp"):
        if not stale.name.startswith("lock."):  # of one who waits for its turn
            with contextlib.suppress(IsADirectoryError):  # no writer's
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
