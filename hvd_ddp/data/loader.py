"""Batches from arrays in memory: gathered and normalised as whole tensors, on the device."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_ddp.data.arrays import ArrayDataset, is_pixels
from hvd_ddp.data.augment import Augmentation
from hvd_ddp.data.items import Part
from hvd_ddp.data.preprocess import Preprocess, in_training
from hvd_ddp.data.sampler import share


class Batch(NamedTuple):
    """Samples on the device. A stand-in has one sample and `num_samples` 0: it goes through the model, but counts 0."""

    inputs: Tensor  # (n, C, H, W), normalised, or (n, ...) as it is; in the dtype of training, whole numbers int64
    targets: Tensor  # (n,) int64: classes; or (n, ...), int64 or in the dtype of training
    num_samples: int  # n, or 0 for a stand-in
    num_bad: int = 0  # samples that were to be here and could not be read


def blank(part: Part, num: int, *, device: torch.device, dtype: torch.dtype) -> Batch:
    """`num` samples of zeros, in the form that those of `part` have when training is in `dtype`."""
    forms = (part.shape, part.dtype), (part.target_shape, part.target_dtype)
    zeros = [
        torch.zeros(num, *shape, dtype=in_training(torch.from_numpy(np.empty(0, kind)).dtype, dtype), device=device)
        for shape, kind in forms
    ]
    return Batch(zeros[0], zeros[1], num)


Asked = tuple[NDArray[np.int64], int]  # samples of one rank in one optimizer step, int64 (n,), and the epoch


class ArrayLoader:
    """Turns indices of `dataset` into batches on `device`.

    Images stay one tensor: the array itself on the CPU, one copy on an accelerator. Batches for training are changed as
    `augment` says, those for evaluation never; how they are normalised says `Preprocess`. Raises ValueError for numbers
    that do not fit the images, and for an `augment` of samples that are no images.
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
        num_channels = dataset.shape[0]
        if len(mean) != num_channels or len(std) != num_channels:
            raise ValueError(f"{num_channels} channels, but {len(mean)} means and {len(std)} stds")
        if augment is not None and not is_pixels(dataset.dtype):
            raise ValueError(f"images are {dataset.dtype}: only uint8 can be augmented")
        self.device = torch.device(device)
        self._preprocess = Preprocess(augment, mean=mean, std=std, device=self.device, dtype=dtype)
        self._images = _as_tensor(dataset.images).to(self.device)
        self._targets = _as_tensor(dataset.targets).to(self.device)

    def __len__(self) -> int:
        return len(self._images)

    def steps(self, asked: Iterable[Asked], accumulate: int) -> Iterator[list[Batch]]:
        """The micro-batches of each step that is asked for."""
        return (self.micro_batches(indices, accumulate, epoch) for indices, epoch in asked)

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

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to end."""

    def _gather(self, indices: NDArray[np.int64], epoch: int) -> Batch:
        chosen = _as_tensor(indices if len(indices) else np.zeros(1, dtype=np.int64)).to(self.device)
        inputs = self._preprocess.training(self._images, chosen, chosen, epoch)
        return Batch(inputs, self._preprocess.targets(self._targets.index_select(0, chosen)), len(indices))

    def _cut(self, first: int, last: int) -> Batch:
        targets = self._preprocess.targets(self._targets[first:last])
        return Batch(self._preprocess.evaluation(self._images[first:last]), targets, last - first)


def _as_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor on the array's own memory; a copy only where the array has strides that torch can't take."""
    array = np.ascontiguousarray(array)
    if array.flags.writeable:  # as the indices of each step
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        # Read-only arrays (memory-mapped, or from bytes) are fine: nothing writes to these tensors.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
