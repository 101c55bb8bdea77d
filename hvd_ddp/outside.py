"""What comes from outside: only regular files are opened, only so much is read, and parsers raise ValueError alone.

A pipe would wait for ever, a device never ends, and brackets that nest deeper than a stack or numbers of 5,000 digits
raise what nobody expects of a parser.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

MOST = 1 << 20  # bytes of what a person or a program writes about a run


def open_regular(path: Path) -> BufferedReader:
    """The file, to be read. Raises OSError; also where it is a pipe, a device or a folder, without opening it."""
    try:
        _refuse_special(os.stat(path).st_mode, path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a zero byte in the name
        raise OSError(errno.EINVAL, str(error)) from error
    file = os.fdopen(descriptor, "rb")
    try:
        _refuse_special(os.fstat(descriptor).st_mode, path)  # it may be another by now
    except OSError:
        file.close()
        raise
    return file


def _refuse_special(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read(path: Path, most: int = MOST) -> bytes:
    """The bytes of a regular file. Raises OSError; also where there are more than `most`."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data


def from_json(data: bytes | str) -> Any:
    """What it stands for. Raises ValueError."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def from_yaml(data: bytes) -> Any:
    """What it stands for, in plain types. Raises ValueError."""
    import yaml

    try:
        return yaml.safe_load(data.decode())
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    except Exception as error:  # PyYAML's constructors raise what the text leads to: IndexError, AttributeError, ...
        raise ValueError(" ".join(str(error).split())) from error
