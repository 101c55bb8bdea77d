"""Data sets that are plain arrays, and the numbers that normalise them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hvd_ddp.data.items import Part

_PIXELS_AT_ONCE = 1 << 22  # bincount widens to int64: 32 MiB at a time


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """Images, or samples of numbers, and the target of each.

    `images` is uint8 (N, C, H, W), floating-point (N, ...) or int64 (N, ...), such as tokens; `targets` int64 (N,) for
    classes, else int64 or floating-point (N, ...); N at least 1. Either may be read-only or memory-mapped. Raises
    ValueError for anything else.
    """

    images: NDArray[Any]
    targets: NDArray[Any]
    augments: ClassVar[bool] = False  # the loader changes images for training, not the data set

    def __post_init__(self) -> None:
        images, targets = self.images, self.targets
        fits = images.ndim == 4 if is_pixels(images.dtype) else images.ndim >= 2 and _is_plain(images.dtype)
        if not fits or 0 in images.shape:
            raise ValueError(
                f"images are {images.dtype} {images.shape}, not uint8 (N, C, H, W) or floating-point or int64 "
                "(N, ...), N >= 1"
            )
        if not _is_plain(targets.dtype) or targets.shape[:1] != images.shape[:1] or 0 in targets.shape:
            raise ValueError(
                f"targets are {targets.dtype} {targets.shape}, not int64 or floating-point ({len(images)}, ...)"
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self.images.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of its numbers."""
        return self.images.dtype

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Of the target of one sample; () for a class."""
        return self.targets.shape[1:]

    @property
    def target_dtype(self) -> np.dtype[Any]:
        """Of its target's numbers."""
        return self.targets.dtype


def _all(part: Part) -> NDArray[Any]:
    return part.images  # type: ignore[union-attr]


@dataclass(frozen=True, eq=False)
class Data:
    """A data set in two parts; `mean` and `std` are of each channel of the train images, in pixel units (0..255).

    Samples that are no images are used as they are: their mean is 0 and their std 1. `num_classes` is None where
    nobody has said and the targets are no classes.
    """

    name: str
    train: Part
    eval: Part
    num_classes: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def measure(
        cls,
        name: str,
        train: Part,
        eval: Part,
        num_classes: int | None,
        *,
        probe: Callable[[Part], NDArray[Any]] = _all,
    ) -> Data:
        """Data with the mean and std of `probe(train)`; ValueError where parts or classes do not fit each other."""
        if train.shape != eval.shape:
            raise ValueError(f"{name}: images are {train.shape} in train, {eval.shape} in eval")
        if train.dtype != eval.dtype:
            raise ValueError(f"{name}: images are {train.dtype} in train, {eval.dtype} in eval")
        targets = [f"{part.target_dtype} {part.target_shape}" for part in (train, eval)]
        if targets[0] != targets[1]:
            raise ValueError(f"{name}: the target of a sample is {targets[0]} in train, {targets[1]} in eval")
        for part in (train, eval):
            if isinstance(part, ArrayDataset) and has_classes(part):
                check_targets(name, part, num_classes or 0)
        num_channels = train.shape[0]
        mean, std = (0.0,) * num_channels, (1.0,) * num_channels
        if is_pixels(train.dtype):
            mean, std = channel_statistics(probe(train))
        return cls(name, train, eval, num_classes, mean, std)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Of one sample: (C, H, W), or whatever samples have that are no images."""
        return self.train.shape

    @property
    def num_channels(self) -> int:
        return self.image_shape[0]

    @property
    def num_train(self) -> int | None:
        """Samples for training; None where nobody knows."""
        return len(self.train) if isinstance(self.train, Sized) else None


def check_targets(name: str, part: ArrayDataset, num_classes: int) -> None:
    """ValueError for targets that are no classes, or outside 0..num_classes-1."""
    if not has_classes(part):
        raise ValueError(f"{name}: targets are {part.targets.dtype} {part.targets.shape}, not int64 ({len(part)},)")
    low, high = int(part.targets.min()), int(part.targets.max())
    if low < 0 or high >= num_classes:
        raise ValueError(f"{name}: targets are {low}..{high}, not within 0..{num_classes - 1}")


def has_classes(part: Part) -> bool:
    """Whether the target of a sample is one whole number: its class."""
    return part.target_shape == () and part.target_dtype == np.int64


def is_pixels(dtype: np.dtype[Any]) -> bool:
    """Whether the samples are images, which are normalised; other numbers are used as they are."""
    return dtype == np.uint8


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype == np.int64 or np.issubdtype(dtype, np.floating)


def channel_statistics(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and population standard deviation of each channel of uint8 (N, C, H, W), in pixel units.

    Sums are exact integers from a histogram, so the result depends on neither order nor machine. A channel that is
    constant has std 1, which leaves it constant when it is normalised.
    """
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = _histogram(images[:, channel])
        num = sum(counts)
        total = sum(value * count for value, count in enumerate(counts))
        squares = sum(value * value * count for value, count in enumerate(counts))
        means.append(total / num)
        stds.append(math.sqrt((num * squares - total * total) / (num * num)) or 1.0)
    return tuple(means), tuple(stds)


def _histogram(plane: NDArray[np.uint8]) -> list[int]:
    """How often each of the values 0..255 occurs in uint8 (N, H, W)."""
    counts = np.zeros(256, dtype=np.int64)
    rows = max(1, _PIXELS_AT_ONCE // (plane.shape[1] * plane.shape[2]))
    for first in range(0, len(plane), rows):
        counts += np.bincount(plane[first : first + rows].ravel(), minlength=256)
    return [int(count) for count in counts]
