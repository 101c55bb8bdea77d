"""Images that nobody took: any shape, number of classes and size, the same bytes everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvd_ddp.data.arrays import ArrayDataset, Data
from hvd_ddp.data.packed import PIECE
from hvd_ddp.data.source import Source
from hvd_ddp.errors import HvdDDPError

DEFAULT = "3x32x32:10:10000"
_PATTERN = re.compile(r"(\d+)x(\d+)x(\d+):(\d+):(\d+)")
_MOST = 1 << 36  # bytes of images: 64 GiB


def synthetic(name: str) -> Source:
    """`synthetic:CxHxW:CLASSES:SIZE`; `synthetic` alone is synthetic:3x32x32:10:10000. Raises HvdDDPError."""
    parameters = name.partition(":")[2] or DEFAULT
    match = _PATTERN.fullmatch(parameters)
    numbers = [int(number) for number in match.groups()] if match else []
    if not match or 0 in numbers:
        raise HvdDDPError(
            f"--data is `{name}`, which is not of the form synthetic:CxHxW:CLASSES:SIZE with numbers from 1 up. "
            f"Write for example `synthetic:{DEFAULT}`: channels x height x width, classes, training images."
        )
    channels, height, width, num_classes, size = numbers
    if channels * height * width * size > _MOST:
        raise HvdDDPError(f"--data `{name}` would take over {_MOST >> 30} GiB. Ask for fewer or smaller images.")
    shape = (channels, height, width)

    def read(data_dir: Path | None) -> Data:
        train = _part(shape, num_classes, size, first=0)
        evaluation = _part(shape, num_classes, -(-size // 10), first=size)
        return Data.measure(name, train, evaluation, num_classes)

    return Source(about="", read=read)


def _part(shape: tuple[int, int, int], num_classes: int, size: int, *, first: int) -> ArrayDataset:
    """Images `first` to `first + size` of an endless row: a quarter the pattern of the class, the rest noise.

    Random bits come straight from PCG64, whose output numpy promises to keep; its distributions it does not.
    """
    num_pixels = shape[0] * shape[1] * shape[2]
    patterns = _noise(0, num_classes, num_pixels) >> 2
    targets = np.arange(first, first + size, dtype=np.int64) % num_classes
    images = np.empty((size, num_pixels), np.uint8)
    rows = max(1, PIECE // num_pixels)
    for start in range(0, size, rows):
        part = images[start : start + rows]
        noise = _noise(1 + first + start, len(part), num_pixels)
        np.subtract(noise, noise >> 2, out=part)  # at most 192, the patterns at most 63
        part += patterns[targets[start : start + rows]]
    return ArrayDataset(images.reshape(size, *shape), targets)


def _noise(seed: int, num: int, num_pixels: int) -> NDArray[np.uint8]:
    """uint8 (num, num_pixels)"""
    words = np.random.PCG64(seed).random_raw(-(-num * num_pixels // 8)).astype("<u8")
    return words.view(np.uint8)[: num * num_pixels].reshape(num, num_pixels)
