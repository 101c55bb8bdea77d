"""Folders that are there whole or not at all, written by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from hvd_ddp.durable import sync_folder
from hvd_ddp.errors import HvdDDPError

log = logging.getLogger(__name__)
FORGOTTEN = 86400.0  # seconds after which what a process of another host left unfinished counts as given up
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF}


class CannotWriteError(HvdDDPError):
    """There is no place for the folder: no permission, no room."""


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Let one process at a time make the folder `path`; who waited finds what the other one made.

    Where the file system has no locks two may work at once: each then writes into a folder of its own, and the first
    that is ready counts. Raises CannotWriteError where nobody may write beside `path`.
    """
    with translated(path):
        descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _wait_for(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.warning("Another process is preparing `%s`: waiting for it.", path)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


@contextlib.contextmanager
def new_folder(path: Path, *, size: int = 0) -> Iterator[Path]:
    """A folder to write into, which becomes `path` at the end of the block, in the place of what is there.

    If anything fails it is removed, and `path` stays what it was; what dead processes left is removed as well. To be
    called inside `only_one`. `size` in bytes is what errors speak of: CannotWriteError for a full or read-only disk.
    """
    _sweep(path)
    mine = _temporary(path)
    with translated(path, size):
        try:
            mine.mkdir()
            yield mine
            sync_folder(mine)
            _put(mine, path)
        finally:
            shutil.rmtree(mine, ignore_errors=True)


def _put(mine: Path, path: Path) -> None:
    old = _temporary(path)
    with contextlib.suppress(FileNotFoundError):
        path.rename(old)
    try:
        mine.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # else: without locks another one was faster
            raise
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def _sweep(path: Path) -> None:
    """Remove what processes that are gone have left unfinished."""
    pattern = re.compile(re.escape(f".{path.name}.") + r"(?P<host>.+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.tmp")
    for name in os.listdir(path.parent) if path.parent.is_dir() else []:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        left = path.with_name(name)
        with contextlib.suppress(OSError):
            if match["host"] == socket.gethostname():
                dead = not psutil.pid_exists(int(match["pid"]))
            else:
                dead = time.time() - left.stat().st_mtime > FORGOTTEN
            if dead:
                shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def translated(path: Path, size: int = 0) -> Iterator[None]:
    """Turn an OSError inside into CannotWriteError: `path`, of `size` bytes, can't be written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CannotWriteError(
                f"`{path.parent}` has no room for `{path.name}`, which takes `{size / 1e6:.1f}` MB ({error.strerror}): "
                "nothing of it was left there. Free some space, or choose a folder on another disk."
            ) from error
        raise CannotWriteError(
            f"`{path}` can't be written ({error.strerror}): the packed data has no place. "
            "Choose an existing folder that you may write to."
        ) from error
