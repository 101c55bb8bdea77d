"""Samples that are read one at a time, by number or in a row, and how a process reads some of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hvd_ddp.data.arrays import ArrayDataset, has_classes
from hvd_ddp.data.hashing import key
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.seeding import seed_generators

Sample = tuple[NDArray[Any], Any]  # the input, and its target: an array, or a class


class Items(Protocol):
    """A data set of which any sample can be read by its number."""

    name: str  # what errors call it
    shape: tuple[int, ...]  # of one sample: (C, H, W) for images
    dtype: np.dtype[Any]  # uint8 for images, else floating-point or int64
    target_shape: tuple[int, ...]  # of the target of one sample: () for a class
    target_dtype: np.dtype[Any]  # int64 or floating-point
    augments: bool  # whether `read` itself changes images for training; else the loader does

    def __len__(self) -> int: ...

    def read(self, index: int, number: int, *, augment: bool) -> Sample:
        """Sample `index`. Whatever is random in it follows from `number`, 64 bits, or from the seeded generators."""


@runtime_checkable
class Stream(Protocol):
    """A data set of which samples come in a row, of a length that nobody knows."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    target_shape: tuple[int, ...]
    target_dtype: np.dtype[Any]
    augments: bool
    sharded: bool  # whether each rank has a row of its own; else all have the same and each takes its share

    def flow(self, epoch: int, rank: int, world_size: int) -> Iterator[Sample]:
        """The row of that epoch, from its beginning; of this rank where it is sharded."""


Part = ArrayDataset | Items | Stream  # what can be trained or evaluated on


class Request(NamedTuple):
    """What is to be read: samples of a data set by number, or by their places in a row."""

    part: int  # which of the reader's data sets
    indices: NDArray[np.int64]  # (n,); rising, in a row
    epoch: int


class Piece(NamedTuple):
    """What was read: the samples in the order of the request, without those that could not be read or are not there."""

    inputs: Tensor  # (n, *shape), in the data set's dtype
    targets: NDArray[Any]  # (n, *target_shape), in the data set's dtype of targets
    samples: NDArray[np.int64]  # (n,), their numbers
    bad: list[str]  # what was wrong with those that could not be read


@dataclass
class Reader:
    """Reads requests, in any process and order; what comes out follows from (seed, epoch, sample) alone.

    `parts` are the data sets for training and for evaluation, None for one that is read otherwise. Raises HvdDDPError
    for a sample that does not fit its data set, and whatever the data set raises; with `skip_bad` such a sample is left
    out and told, but for one in a row: what comes behind it is not to be had any more.
    """

    parts: tuple[Items | Stream | None, ...]
    num_classes: int | None
    seed: int
    augment: bool
    skip_bad: bool
    rank: int
    world_size: int
    _flows: dict[int, tuple[int, int, Iterator[Sample]]] = field(default_factory=dict)  # part -> epoch, place, the rest

    def __call__(self, request: Request, *, shared: bool = False) -> Piece:
        """Read it; `shared` for inputs in memory that can be handed to another process."""
        part = self.parts[request.part]
        assert part is not None
        num = len(request.indices)
        inputs = torch.empty(num, *part.shape, dtype=torch.from_numpy(np.empty(0, part.dtype)).dtype)
        if shared and num:
            inputs.share_memory_()
        rows, targets = inputs.numpy(), np.empty((num, *part.target_shape), part.target_dtype)
        samples, bad = list[int](), list[str]()
        with generators_as_before():
            for index, sample in self._read(part, request, bad):
                rows[len(samples)], targets[len(samples)] = sample
                samples.append(index)
        return Piece(inputs[: len(samples)], targets[: len(samples)], np.array(samples, np.int64), bad)

    def _read(self, part: Items | Stream, request: Request, bad: list[str]) -> Iterator[tuple[int, Sample]]:
        if isinstance(part, Stream):
            yield from self._follow(part, request)
            return
        for index in request.indices.tolist():
            number = self._number(request, index)
            seed_generators(number)
            try:
                sample = part.read(index, number, augment=self.augment and request.part == 0)
                self._check(part, index, sample)
            except Exception as error:
                if not self.skip_bad:
                    raise
                bad.append(
                    str(error) if isinstance(error, HvdDDPError) else f"`{part.name}`, sample {index}: {error!r}"
                )
            else:
                yield index, sample

    def _follow(self, part: Stream, request: Request) -> Iterator[tuple[int, Sample]]:
        """The places of the row that are asked for and are there; it is begun anew for a place that has gone by."""
        if not len(request.indices):
            return
        first, last = int(request.indices[0]), int(request.indices[-1])
        epoch, place, flow = self._flows.pop(request.part, (-1, 0, iter(())))
        if epoch != request.epoch or place > first:
            place = 0
            seed_generators(self._number(request, -1))
            flow = iter(part.flow(request.epoch, self.rank, self.world_size))
        while place <= last:
            seed_generators(self._number(request, place))
            sample = next(flow, None)
            if sample is None:
                break
            if place >= first:
                self._check(part, place, sample)
                yield place, sample
            place += 1
        self._flows[request.part] = (request.epoch, place, flow)

    def _number(self, request: Request, index: int) -> int:
        return key(f"hvd_ddp sample {self.seed} {request.part} {request.epoch} {index}")

    def _check(self, part: Items | Stream, index: int, sample: Sample) -> None:
        target = sample[1]
        check_form(part, index, sample)
        if has_classes(part) and self.num_classes is not None and not 0 <= target < self.num_classes:
            raise HvdDDPError(
                f"`{part.name}` has the class `{target}` at sample {index}, with {self.num_classes} classes: it is not "
                f"within 0..{self.num_classes - 1}. Mend the label, or the number of classes."
            )


def check_form(part: Items | Stream, index: int, sample: Sample) -> None:
    """Raise HvdDDPError for a sample of another shape or type than the data set's first."""
    array, target = sample[0], np.asarray(sample[1])
    for what, mine, wanted in (
        ("", (array.dtype, array.shape), (part.dtype, part.shape)),
        ("the target of ", (target.dtype, target.shape), (part.target_dtype, part.target_shape)),
    ):
        if mine != wanted:
            raise HvdDDPError(
                f"`{part.name}` has {wanted[0]} `{wanted[1]}` as {what}its first sample and {mine[0]} `{mine[1]}` as "
                f"{what}its sample {index}: they make no batch. Bring all to one shape and type."
            )


@contextmanager
def generators_as_before() -> Iterator[None]:
    """Give Python's, numpy's and torch's random generators back as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
