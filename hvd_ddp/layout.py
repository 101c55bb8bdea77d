"""How a tensor lies in memory: with its channels last, for one."""

from __future__ import annotations

from torch import Tensor


def order(tensor: Tensor) -> list[int]:
    """Its dimensions, the one of the largest stride first."""
    return sorted(range(tensor.ndim), key=lambda dimension: -tensor.stride()[dimension])


def as_it_lies(tensor: Tensor) -> Tensor:
    """The same memory, with the dimensions in the order in which they lie there: contiguous if there are no gaps."""
    return tensor if tensor.is_contiguous() else tensor.permute(order(tensor))
