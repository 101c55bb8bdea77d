"""Batches from arrays in memory: gathered and normalised as whole tensors, on the device."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_ddp.data.arrays import ArrayDataset, is_float
from hvd_ddp.data.augment import Augmentation
from hvd_ddp.data.fused import Fused
from hvd_ddp.data.sampler import share

log = logging.getLogger(__name__)


class Batch(NamedTuple):
    """Samples on the device. A stand-in has one sample and `num_samples` 0: it goes through the model, but counts 0."""

    inputs: Tensor  # (n, C, H, W), normalised, or (n, ...) as it is; in the dtype of training
    targets: Tensor  # (n,) int64
    num_samples: int  # n, or 0 for a stand-in


class ArrayLoader:
    """Turns indices of `dataset` into batches on `device`.

    Images stay one tensor: the array itself on the CPU, one copy on an accelerator. `mean` and `std` are per channel,
    in pixel units; floating-point samples are only converted. What a sample comes out as does not depend on its batch,
    bit for bit: a conversion, a subtraction and a division for each pixel, each rounded as IEEE 754 says. Batches for
    training are changed as `augment` says, those for evaluation never. Raises ValueError for numbers that do not fit
    the images, and for an `augment` of floating-point samples.
    """

    def __init__(
        self,
        dataset: ArrayDataset,
        augment: Augmentation | None = None,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        num_channels = dataset.images.shape[1]
        if len(mean) != num_channels or len(std) != num_channels:
            raise ValueError(f"{num_channels} channels, but {len(mean)} means and {len(std)} stds")
        if not dtype.is_floating_point or any(value <= 0 for value in std):
            raise ValueError(f"dtype is {dtype}, std {tuple(std)}: need a floating-point dtype and stds above 0")
        if augment is not None and is_float(dataset.images):
            raise ValueError(f"images are {dataset.images.dtype}: only uint8 can be augmented")
        self.device, self.dtype = torch.device(device), dtype
        self._images = _as_tensor(dataset.images).to(self.device)
        self._targets = _as_tensor(dataset.targets).to(self.device)
        self._mean = torch.tensor(mean, dtype=dtype, device=self.device).view(-1, 1, 1)
        self._std = torch.tensor(std, dtype=dtype, device=self.device).view(-1, 1, 1)
        self._augment = augment
        self._fused = None if augment is None or self.device.type != "cpu" else self._fuse(augment)

    def __len__(self) -> int:
        return len(self._images)

    def micro_batches(self, indices: NDArray[np.int64], accumulate: int, epoch: int = 0) -> list[Batch]:
        """One optimizer step's samples of this rank, `indices` int64 (n,), in `accumulate` contiguous shares.

        `epoch` is for the augmentation, which shows a sample otherwise in each.
        The list always has `accumulate` batches; a share without samples becomes a stand-in, the first sample of the
        data set. Raises ValueError for `accumulate` below 1, IndexError for an index outside the data set.
        """
        if accumulate < 1:
            raise ValueError(f"accumulate is {accumulate}, not at least 1")
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"indices are {indices.min()}..{indices.max()}, not within 0..{len(self) - 1}")
        # Each is gathered by itself, not cut from one tensor: views begin at any address, and MKL may round
        # differently for another alignment.
        return [self._gather(indices[share(len(indices), number, accumulate)], epoch) for number in range(accumulate)]

    def evaluation_batches(self, *, rank: int, world_size: int, batch_size: int = 256) -> Iterator[Batch]:
        """This rank's share of the data set in order, without padding: the last batch may be small, or there is none.

        Raises ValueError, at once, for a bad rank or batch size.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, not at least 1")
        part = share(len(self), rank, world_size)
        firsts = range(part.start, part.stop, batch_size)
        return (self._cut(first, min(first + batch_size, part.stop)) for first in firsts)

    def _gather(self, indices: NDArray[np.int64], epoch: int) -> Batch:
        chosen = _as_tensor(indices if len(indices) else np.zeros(1, dtype=np.int64)).to(self.device)
        return Batch(self._inputs(chosen, epoch), self._targets.index_select(0, chosen), len(indices))

    def _inputs(self, chosen: Tensor, epoch: int) -> Tensor:
        if self._augment is None:
            return self._normalise(self._images.index_select(0, chosen))
        height, width = self._images.shape[2:]
        draws = self._augment.draw(chosen, epoch, height=height, width=width)
        if self._fused is None:
            return self._augment.look(self._images, chosen, draws, self._normalise)
        return self._fused(chosen, draws)

    def _fuse(self, augment: Augmentation) -> Fused | None:
        values = torch.arange(256, dtype=torch.uint8, device="cpu").expand(1, len(self._mean), 1, 256)
        try:
            return Fused(augment, self._images, self._normalise(values)[0, :, 0])
        except ImportError as error:
            log.warning("numba can't be imported (%s): images are augmented by torch, which is slower", error)
            return None

    def _cut(self, first: int, last: int) -> Batch:
        return Batch(self._normalise(self._images[first:last]), self._targets[first:last], last - first)

    def _normalise(self, images: Tensor) -> Tensor:
        """A new tensor in the dtype of training; uint8 (n, C, H, W) is normalised, floating-point (n, ...) is not."""
        if images.is_floating_point():
            return images.to(self.dtype, copy=True)
        return images.to(self.dtype).sub_(self._mean).div_(self._std)


def _as_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor on the array's own memory; a copy only where the array has strides that torch can't take."""
    with warnings.catch_warnings():
        # Read-only arrays (memory-mapped, or from bytes) are fine: nothing writes to these tensors.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(array))
