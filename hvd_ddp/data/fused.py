"""Gather, crop, flip, normalise and cutout in one pass over memory, compiled for the CPU that it runs on."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvd_ddp.data.augment import Augmentation

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes a number: integers of the same size


class Fused:
    """`Augmentation.look` for uint8 images on the CPU, bit for bit, several times as fast.

    A pixel has 256 values, so normalising is a look-up in a table that `normalise` itself has filled: (C, 256), in the
    dtype of training. The compiled code moves bits and computes nothing that could be rounded. It runs on one thread
    without Python's lock: at 400,000 images of 32x32 a second of a core it is the model that one waits for.

    Raises ImportError where numba can't be imported, as with a numpy that is newer than it knows.
    """

    def __init__(self, augmentation: Augmentation, table: Tensor) -> None:
        self.augmentation = augmentation
        self._bits = _BITS[table.dtype.itemsize]
        self._dtype, self._table = table.dtype, table.contiguous().view(self._bits).numpy()
        self._fill = _compiled(str(self._bits).removeprefix("torch."))

    def __call__(self, images: Tensor, samples: Tensor, draws: Tensor) -> Tensor:
        """The `samples`, int64 (n,), of uint8 `images` (N, C, H, W) with their draws, int64 (n, 5): (n, C, H, W)."""
        looks = torch.empty(len(samples), *images.shape[1:], dtype=self._dtype, device="cpu")
        rows, columns = self.augmentation.padding
        self._fill(
            images.numpy(), samples.numpy(), draws.numpy(), self._table, rows, columns, self.augmentation.cutout,
            looks.view(self._bits).numpy(),
        )  # fmt: skip
        return looks


@functools.cache
def _compiled(bits: str) -> Any:
    """`_fill` for results of that integer type; compiled now, not in the first step.

    Every process compiles it anew, in half a second to one. numba's cache would save a part of that, but where two
    processes fill it at once, its index can point one of them to the code of the other: for another CPU of a mixed
    cluster, or for another type. It also needs a folder that can be written to, which a container may not have.
    """
    from numba import njit

    images, numbers, draws = "uint8[:,:,:,::1]", "int64[::1]", "int64[:,::1]"
    table, looks = f"{bits}[:,::1]", f"{bits}[:,:,:,::1]"
    signature = f"void({images}, {numbers}, {draws}, {table}, int64, int64, int64, {looks})"
    return njit(signature, nogil=True, error_model="numpy")(_fill)


def _fill(images: Any, samples: Any, draws: Any, table: Any, pad_y: int, pad_x: int, cutout: int, looks: Any) -> None:
    num, num_channels, height, width = looks.shape
    line = np.zeros(width + 1, np.uint8)  # a row of the image, and behind it what a column outside sees
    columns = np.empty(width, np.uintp)
    for i in range(num):
        sample = samples[i]  # read once: the compiler can't know that writing to `line` leaves it alone
        top, left, flip = draws[i, 0] - pad_y, draws[i, 1] - pad_x, draws[i, 2]
        cut_y, cut_x = draws[i, 3] - cutout // 2, draws[i, 4] - cutout // 2
        for x in range(width):
            column = (width - 1 - x if flip else x) + left
            columns[x] = column if 0 <= column < width else width
        for channel in range(num_channels):
            for y in range(height):
                row = y + top
                if 0 <= row < height:
                    for x in range(width):
                        line[x] = images[sample, channel, row, x]
                    for x in range(width):
                        looks[i, channel, y, x] = table[channel, line[columns[x]]]
                else:
                    for x in range(width):
                        looks[i, channel, y, x] = table[channel, 0]
            for y in range(max(0, cut_y), min(height, cut_y + cutout)):
                for x in range(max(0, cut_x), min(width, cut_x + cutout)):
                    looks[i, channel, y, x] = 0
