"""The user's own data: what `module:factory` returns, as arrays."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, TensorDataset

from hvd_ddp.data.arrays import ArrayDataset, Data, is_float
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.models import load_factory

NUM_PROBES = 32  # samples that are read twice: random ones would be frozen into what they were the first time
MOST = 1 << 33  # bytes of one part that are read into memory
_FLOATS = (np.float16, np.float32, np.float64)


def load(name: str, data_dir: Path | None) -> Data:
    """What the factory makes of `data_dir`: `(train, eval)` or `(train, eval, num_classes)`.

    A part is an ArrayDataset, a TensorDataset (its memory is used as it is), or any map-style data set of
    `(input, target)`, read once into memory. Without `num_classes` it is the largest target plus one. Raises
    HvdDDPError for what is none of these; the factory's own exceptions come through.
    """
    factory = load_factory("--data", name)
    try:
        inspect.signature(factory).bind(data_dir)
    except (TypeError, ValueError) as error:
        raise HvdDDPError(f"--data `{name}` can't be called as factory(data_dir): {error}. Mend it.") from error
    made = factory(data_dir)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise HvdDDPError(
            f"--data `{name}` returned a `{_kind(made)}`: not a training and an evaluation set. "
            "Return (train, eval) or (train, eval, num_classes)."
        )
    train, evaluation = (
        _arrays(f"{name}, {part}", value) for part, value in zip(("train", "eval"), made, strict=False)
    )
    num_classes = made[2] if len(made) == 3 else int(max(train.targets.max(), evaluation.targets.max())) + 1
    if not isinstance(num_classes, int) or num_classes < 1:
        raise HvdDDPError(
            f"--data `{name}` returned `{num_classes!r}` as num_classes. Return a whole number from 1 up."
        )
    try:
        return Data.measure(name, train, evaluation, num_classes)
    except ValueError as error:
        raise HvdDDPError(f"--data {_quoted(error)}: no model can be trained on that. Mend the factory.") from error


def _arrays(origin: str, part: Any) -> ArrayDataset:
    if isinstance(part, ArrayDataset):
        return part
    if isinstance(part, IterableDataset) or not (hasattr(part, "__getitem__") and hasattr(part, "__len__")):
        raise HvdDDPError(
            f"--data `{origin}` is a `{_kind(part)}`, which has no length or no items by number: the exact order of "
            "the samples needs both. Return a map-style data set, with __len__ and __getitem__."
        )
    if len(part) == 0:
        raise HvdDDPError(f"--data `{origin}` is empty: there is nothing to do. Return at least one sample.")
    if isinstance(part, TensorDataset) and len(part.tensors) == 2:
        inputs, targets = (_array(origin, tensor) for tensor in part.tensors)
    else:
        inputs, targets = _read(origin, part)
    try:
        return ArrayDataset(_samples(origin, inputs), _targets(origin, targets))
    except ValueError as error:
        raise HvdDDPError(f"--data {_quoted(f'{origin}: {error}')}. Mend the factory.") from error


def _read(origin: str, part: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Each item once, into memory; refused where a second look shows another sample."""
    probes = {len(part) * number // NUM_PROBES for number in range(NUM_PROBES)}
    first, _ = _item(origin, part, 0)
    if first.nbytes * len(part) > MOST:
        raise HvdDDPError(
            f"--data `{origin}` would take `{first.nbytes * len(part) / 1e9:.1f}` GB in the memory of every rank. "
            "Return a TensorDataset or an ArrayDataset of memory-mapped arrays (np.load with mmap_mode='r')."
        )
    inputs = np.empty((len(part), *first.shape), first.dtype)
    targets = []
    for index in range(len(part)):
        sample, target = _item(origin, part, index)
        if sample.shape != first.shape or sample.dtype != first.dtype:
            raise HvdDDPError(
                f"--data `{origin}` has {first.dtype} `{first.shape}` as its sample 0 and {sample.dtype} "
                f"`{sample.shape}` as its sample {index}: they make no batch. Bring all to one shape and type."
            )
        inputs[index] = sample
        targets.append(target)
    for index in sorted(probes):
        again, target = _item(origin, part, index)
        if target != targets[index] or not np.array_equal(again, inputs[index], equal_nan=is_float(again)):
            raise HvdDDPError(
                f"--data `{origin}` gives another sample {index} each time (random transforms?): it is read once, so "
                "that all epochs would see the same. Leave the random part out; --augment does that for images."
            )
    return inputs, np.asarray(targets)


def _item(origin: str, part: Any, index: int) -> tuple[NDArray[Any], Any]:
    item = part[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise HvdDDPError(f"--data `{origin}` has a `{_kind(item)}` as its sample {index}. Return (input, target).")
    sample, target = _array(origin, item[0]), _array(origin, item[1])
    if target.ndim:
        raise HvdDDPError(
            f"--data `{origin}` has a target of the shape `{target.shape}` at sample {index}: the loss wants one class "
            "a sample. Return a whole number."
        )
    if not isinstance(item[0], torch.Tensor | np.ndarray) and sample.dtype == np.uint8:
        sample = sample[None] if sample.ndim == 2 else np.moveaxis(sample, -1, 0)  # a PIL image: (H, W) or (H, W, C)
    return sample, target.item()


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


def _samples(origin: str, inputs: NDArray[Any]) -> NDArray[Any]:
    """uint8 (N, C, H, W) or floats (N, ...)."""
    if inputs.dtype in _FLOATS:
        return inputs if inputs.ndim > 1 else inputs[:, None]
    if inputs.dtype == np.uint8 and inputs.ndim in (3, 4):
        return inputs if inputs.ndim == 4 else inputs[:, None]
    raise HvdDDPError(
        f"--data `{origin}` has inputs of the type {inputs.dtype} and the shape `{inputs.shape}`, which are neither "
        "images (uint8, (N, C, H, W) or (N, H, W)) nor floating-point numbers. Convert them to float32."
    )


def _targets(origin: str, targets: NDArray[Any]) -> NDArray[np.int64]:
    if targets.dtype.kind not in "iu" or targets.ndim != 1:
        raise HvdDDPError(
            f"--data `{origin}` has targets of the type {targets.dtype} and the shape `{targets.shape}`: the loss "
            "wants one class a sample. Return whole numbers, (N,)."
        )
    return targets.astype(np.int64, copy=False)


def _kind(value: Any) -> str:
    return f"tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def _quoted(error: object) -> str:
    return f"`{error}`"
