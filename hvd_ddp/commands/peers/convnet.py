"""`hvd_ddp.models.ConvNet` for libraries with channels last: its weights as they want them, its pooling as a matrix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hvd_ddp.models import SIDE

FLAT = "classifier.0.weight"  # of the layer after flattening: its inputs come in another order
Array = NDArray[np.float32]


def weights(model: nn.Module) -> list[Array]:
    """Kernels (H, W, in, out) or (in, out) and biases (out,) of the four layers in turn."""
    return [_to_last(name, tensor).contiguous().numpy() for name, tensor in model.state_dict().items()]


def put_back(model: nn.Module, arrays: Sequence[Array]) -> None:
    """Let the model have these weights."""
    for (name, tensor), array in zip(model.state_dict().items(), arrays, strict=True):
        tensor.copy_(_to_first(name, torch.tensor(array), tensor))


def _to_last(name: str, tensor: Tensor) -> Tensor:
    if name == FLAT:
        return tensor.view(len(tensor), -1, SIDE, SIDE).permute(2, 3, 1, 0).flatten(0, 2)
    return tensor.permute(2, 3, 1, 0) if tensor.ndim == 4 else tensor.t()


def _to_first(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    if name == FLAT:
        return tensor.view(SIDE, SIDE, -1, len(like)).permute(3, 2, 0, 1).flatten(1)
    return tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor.t()


def averages(size: int) -> Array:
    """What AdaptiveAvgPool2d does along a side, (SIDE, size): row i is the mean from i*size/SIDE to (i+1)*size/SIDE."""
    matrix = np.zeros((SIDE, size), dtype=np.float32)
    for i in range(SIDE):
        low, high = i * size // SIDE, -(-(i + 1) * size // SIDE)
        matrix[i, low:high] = 1 / (high - low)
    return matrix
