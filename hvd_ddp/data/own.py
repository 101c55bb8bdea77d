"""The user's own data: what `module:factory` returns."""

from __future__ import annotations

import functools
import inspect
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, TensorDataset

from hvd_ddp.data.arrays import ArrayDataset, Data, has_classes
from hvd_ddp.data.items import Part, Sample, check_form, generators_as_before
from hvd_ddp.data.source import Source
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.models import load_factory
from hvd_ddp.seeding import seed_generators

log = logging.getLogger(__name__)

NUM_PROBES = 256  # images whose mean and std stand for those of all, where all can't be held in memory
_FLOATS = (np.float16, np.float32, np.float64)


def own(name: str) -> Source:
    """What the factory makes of `data_dir`: `(train, eval)` or `(train, eval, num_classes)`.

    An ArrayDataset or a TensorDataset is used as it is in memory. Of any map-style data set of `(input, target)` the
    samples are read when they are needed; an iterable one is read in its own order (`OwnStream`). Without
    `num_classes` it is the length of the training set's `classes`, else the largest target plus one. Raises
    HvdDDPError for what is none of these; the factory's own exceptions come through. Targets that are no classes, such
    as masks, tokens or measurements, have no number of classes but what the factory says.
    """

    @functools.cache
    def parts(data_dir: Path | None) -> tuple[Part, Part, int | None]:
        return _parts(name, data_dir)

    return Source.surveyed(
        "",
        look=lambda data_dir: json.dumps(_measure(name, *parts(data_dir))).encode(),
        read=lambda data_dir, found: _data(name, parts(data_dir), json.loads(found)),
    )


def own_data(train: Any, evaluation: Any, num_classes: int | None = None, *, name: str = "own") -> Data:
    """Data sets of your own for `Trainer`, as a factory would return them for --data; `name` is what errors call them.

    Raises HvdDDPError like `own`.
    """
    parts = _as_parts(name, (train, evaluation, num_classes))
    return _data(name, parts, list(_measure(name, *parts)))


def _data(name: str, parts: tuple[Part, Part, int | None], found: list[Any]) -> Data:
    num_classes, mean, std = found
    return Data(name, parts[0], parts[1], num_classes, tuple(mean), tuple(std))


class OwnItems:
    """A map-style data set of `(input, target)`: tensors, arrays or PIL images, and a whole number for a class."""

    augments = False

    def __init__(self, name: str, dataset: Any) -> None:
        self.name, self.dataset = name, dataset
        if len(self) == 0:
            raise HvdDDPError(f"--data `{name}` is empty: there is nothing to do. Return at least one sample.")
        self.shape, self.dtype, self.target_shape, self.target_dtype = _form(name, functools.partial(self.read, 0, 0))

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int, number: int, *, augment: bool = False) -> Sample:
        """The data set's own item; what it draws from random generators follows from how they are seeded."""
        return _sample(self.name, index, self.dataset[index])


class OwnStream:
    """An iterable data set of `(input, target)`.

    One that has `shard(rank, world_size)` gives each rank an iterable of its own. Of any other each rank reads the
    whole and uses its share of each global batch, so that it must come in the same order everywhere. `set_epoch(epoch)`
    is called before each pass, if there is one.
    """

    augments = False

    def __init__(self, name: str, dataset: Any) -> None:
        self.name, self.dataset = name, dataset
        self.sharded = hasattr(dataset, "shard")
        self.shape, self.dtype, self.target_shape, self.target_dtype = _form(name, lambda: next(self.flow(0, 0, 1)))

    def flow(self, epoch: int, rank: int, world_size: int) -> Iterator[Sample]:
        """The samples of an epoch in the data set's order."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        source = self.dataset.shard(rank, world_size) if self.sharded else self.dataset
        for index, item in enumerate(source):
            yield _sample(self.name, index, item)


def _form(
    name: str, first: Callable[[], Sample]
) -> tuple[tuple[int, ...], np.dtype[Any], tuple[int, ...], np.dtype[Any]]:
    """Shape and type of the first sample and of its target, which all others must have."""
    with generators_as_before():
        seed_generators(0)
        try:
            array, target = first()
        except StopIteration:
            raise HvdDDPError(
                f"--data `{name}` is empty: there is nothing to do. Return at least one sample."
            ) from None
    return array.shape, array.dtype, target.shape, target.dtype


def _parts(name: str, data_dir: Path | None) -> tuple[Part, Part, int | None]:
    factory = load_factory("--data", name)
    try:
        inspect.signature(factory).bind(data_dir)
    except (TypeError, ValueError) as error:
        raise HvdDDPError(f"--data `{name}` can't be called as factory(data_dir): {error}. Mend it.") from error
    return _as_parts(name, factory(data_dir))


def _as_parts(name: str, made: Any) -> tuple[Part, Part, int | None]:
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise HvdDDPError(
            f"--data `{name}` returned a `{_kind(made)}`: not a training and an evaluation set. "
            "Return (train, eval) or (train, eval, num_classes)."
        )
    train, evaluation = (_part(f"{name}, {part}", value) for part, value in zip(("train", "eval"), made, strict=False))
    num_classes = made[2] if len(made) == 3 else None
    if num_classes is not None and (not isinstance(num_classes, int) or num_classes < 1):
        raise HvdDDPError(
            f"--data `{name}` returned `{num_classes!r}` as num_classes. Return a whole number from 1 up."
        )
    return train, evaluation, num_classes


def _part(origin: str, part: Any) -> Part:
    if isinstance(part, ArrayDataset):
        return part
    if isinstance(part, TensorDataset) and len(part.tensors) == 2:
        if len(part.tensors[0]) == 0:
            raise HvdDDPError(f"--data `{origin}` is empty: there is nothing to do. Return at least one sample.")
        inputs, targets = (_array(origin, tensor) for tensor in part.tensors)
        try:
            return ArrayDataset(_inputs(origin, inputs), _targets(targets))
        except ValueError as error:
            raise HvdDDPError(f"--data {_quoted(f'{origin}: {error}')}. Mend the factory.") from error
    if isinstance(part, IterableDataset) or (hasattr(part, "__iter__") and not hasattr(part, "__getitem__")):
        return OwnStream(origin, part)
    if hasattr(part, "__getitem__") and hasattr(part, "__len__"):
        return OwnItems(origin, part)
    raise HvdDDPError(
        f"--data `{origin}` is a `{_kind(part)}`, which is no data set. Return a map-style one, with __len__ and "
        "__getitem__, or an iterable one."
    )


def _measure(
    name: str, train: Part, evaluation: Part, num_classes: int | None
) -> tuple[int | None, tuple[float, ...], tuple[float, ...]]:
    """Number of classes, mean and std, found out by one rank for all."""
    if num_classes is None:
        num_classes = _num_classes(name, train, evaluation)
    try:
        data = Data.measure(name, train, evaluation, num_classes, probe=_probe)
    except ValueError as error:
        raise HvdDDPError(f"--data {_quoted(error)}: no model can be trained on that. Mend the factory.") from error
    return num_classes, data.mean, data.std


def _num_classes(name: str, *parts: Part) -> int | None:
    classes = getattr(getattr(parts[0], "dataset", None), "classes", None)
    if isinstance(classes, list | tuple):
        return len(classes)
    if not all(map(has_classes, parts)):
        return None
    if any(isinstance(part, OwnStream) for part in parts):
        raise HvdDDPError(
            f"--data `{name}` has an iterable data set, whose classes nobody can count beforehand. Return (train, "
            "eval, num_classes)."
        )
    largest = 0
    for part in parts:
        if isinstance(part, ArrayDataset):
            largest = max(largest, int(part.targets.max()))
            continue
        items = cast(OwnItems, part)
        log.warning("Reading all %d samples of `%s` to count its classes: return (train, eval, num_classes) to spare "
                    "that.", len(items), items.name)  # fmt: skip
        with generators_as_before():
            for index in range(len(items)):
                seed_generators(0)
                sample = items.read(index, 0)
                check_form(items, index, sample)
                largest = max(largest, int(sample[1]))
    return largest + 1


def _probe(part: Part) -> NDArray[Any]:
    """Some of the samples, to measure: (n, *shape)."""
    if isinstance(part, ArrayDataset):
        return part.images
    with generators_as_before():
        seed_generators(0)
        if isinstance(part, OwnStream):
            return np.stack([sample for _, (sample, _) in zip(range(NUM_PROBES), part.flow(0, 0, 1), strict=False)])
        items = cast(OwnItems, part)
        num = min(NUM_PROBES, len(items))
        return np.stack([items.read(len(items) * number // num, 0)[0] for number in range(num)])


def _sample(origin: str, index: int, item: Any) -> Sample:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise HvdDDPError(f"--data `{origin}` has a `{_kind(item)}` as its sample {index}. Return (input, target).")
    sample, target = _array(origin, item[0]), _array(origin, item[1])
    if not isinstance(item[0], torch.Tensor | np.ndarray) and sample.dtype == np.uint8:
        sample = sample[None] if sample.ndim == 2 else np.moveaxis(sample, -1, 0)  # a PIL image: (H, W) or (H, W, C)
    return _inputs(origin, sample[None])[0], _targets(target)


def _array(origin: str, value: Any) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # type: ignore[no-any-return]
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise HvdDDPError(
            f"--data `{origin}` holds a `{_kind(value)}`, which makes no array: {error}. Mend it."
        ) from error
    if array.dtype.kind not in "biuf":
        raise HvdDDPError(f"--data `{origin}` holds a `{_kind(value)}`, which is no numbers. Return tensors or arrays.")
    return array


def _inputs(origin: str, inputs: NDArray[Any]) -> NDArray[Any]:
    """uint8 (N, C, H, W), floats (N, ...) or int64 (N, ...)."""
    if inputs.dtype.kind in "iub" and inputs.dtype != np.uint8:
        inputs = inputs.astype(np.int64, copy=False)
    if inputs.dtype in (np.int64, *_FLOATS):
        return inputs if inputs.ndim > 1 else inputs[:, None]
    if inputs.dtype == np.uint8 and inputs.ndim in (3, 4):
        return inputs if inputs.ndim == 4 else inputs[:, None]
    raise HvdDDPError(
        f"--data `{origin}` has inputs of the type {inputs.dtype} and the shape `{inputs.shape[1:]}` a sample, which "
        "are neither images (uint8, (C, H, W) or (H, W)) nor floating-point numbers. Convert them to float32, tokens "
        "to int64."
    )


def _targets(targets: NDArray[Any]) -> NDArray[Any]:
    """Of any shape: whole numbers as int64, others as they are."""
    if targets.dtype in _FLOATS:
        return targets
    return targets.astype(np.float64 if targets.dtype.kind == "f" else np.int64, copy=False)


def _kind(value: Any) -> str:
    return f"tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def _quoted(error: object) -> str:
    return f"`{error}`"
