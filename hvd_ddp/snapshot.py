"""A state as it was at one moment, in memory of its own, and nothing in it that could not be loaded again."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ddp.errors import HvdDDPError

PLAIN = frozenset({type(None), bool, int, float, str})
CONTAINERS = frozenset({dict, OrderedDict, list, tuple})


class Snapshot:
    """Copies of a state on the CPU. The next takes the memory of the last: fresh pages cost eight times the copy."""

    def __init__(self) -> None:
        self._room: dict[str, Tensor] = {}

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same dict of copies; raises HvdDDPError like `refuse_foreign`. Tied weights stay one tensor.

        The one before is overwritten.
        """
        taken: dict[tuple[Any, ...], Tensor] = {}

        def copy(tensor: Tensor, path: str) -> Tensor:
            same = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
            if same not in taken:
                room = self._room.get(path)
                if room is None or room.dtype != tensor.dtype or room.shape != tensor.shape:
                    room = self._room[path] = torch.empty_like(tensor, device="cpu", requires_grad=False)
                taken[same] = room.copy_(tensor.detach())
            return taken[same]

        found: dict[str, Any] = _map(state, "", copy)
        return found


def refuse_foreign(state: dict[str, Any]) -> None:
    """Raise HvdDDPError that names the key of a value which torch.load(weights_only=True) would not load."""
    _map(state, "", lambda tensor, path: tensor)


def _map(value: Any, path: str, copy: Callable[[Tensor, str], Tensor]) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
        return copy(value, path)
    if kind is list or kind is tuple:
        return kind(_map(item, f"{path}.{number}", copy) for number, item in enumerate(value))
    if kind in CONTAINERS:
        inside = f"{path}." if path else ""
        items = [(key if type(key) in PLAIN else _through_a_file(key, path), item) for key, item in value.items()]
        return kind((key, _map(item, f"{inside}{key}", copy)) for key, item in items)
    return _through_a_file(value, path)


def _through_a_file(value: Any, path: str) -> Any:
    """What comes back from a file; whatever torch can load is allowed, in whichever version."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        return torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise HvdDDPError(
            f"`{path}` in the state of this run is a `{kind}`: a checkpoint with it could not be loaded, which takes "
            "tensors and plain types alone. Let the model or optimizer give numbers, strings, lists, dicts or tensors "
            "there (float(x), str(x), x.tolist(), torch.tensor(x))."
        ) from error
