"""Gradients side by side in few tensors, as DDP has them: Horovod is given these, not each by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.layout import as_it_lies

ALIGNED = 64  # bytes: where a gradient may begin
SIZE = 25.0  # MiB of a bucket, as in DDP

Start = Callable[[Tensor, str], Any]  # begins to reduce a tensor in place, under a name; what `Finish` waits for
Finish = Callable[[Any], object]


class Buckets:
    """Reduces the gradients of `model` while backward still runs, a bucket as soon as all of its gradients are there.

    They are scaled by `scale` on their way into the bucket, and sent as `dtype`, or as their own where it is None. A
    bucket has at most `mebibytes`, or one parameter. Last layers come first, as in backward.
    """

    def __init__(
        self,
        model: nn.Module,
        start: Start,
        finish: Finish,
        *,
        name: str,
        scale: float,
        mebibytes: float = SIZE,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.paused = False  # in the micro-batches of a step before its last
        self._finish = finish
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        for parameters in _groups(model, mebibytes * (1 << 20)):
            bucket = _Bucket(parameters, start, name=f"{name}.{len(self._buckets)}", scale=scale, dtype=dtype)
            self._buckets.append(bucket)
            for parameter in parameters:
                self._bucket_of[parameter] = bucket
                parameter.register_post_accumulate_grad_hook(self._ready)

    @property
    def begun(self) -> bool:
        """Whether a backward has put something into them that is not yet reduced."""
        return any(bucket.begun for bucket in self._buckets)

    def finish(self) -> None:
        """Wait for all of them, and for those that this backward left incomplete: what got no gradient counts as zero.

        After it every parameter has its reduced gradient.
        """
        for bucket in self._buckets:
            bucket.complete()
        for bucket in self._buckets:
            self._finish(bucket.handle)
            bucket.give_back()

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self.paused:
            self._bucket_of[parameter].put(parameter)


class _Bucket:
    def __init__(
        self, parameters: list[nn.Parameter], start: Start, *, name: str, scale: float, dtype: torch.dtype | None
    ) -> None:
        self._name, self._start, self._scale = name, start, scale
        first = parameters[0]
        kind = first.dtype if dtype is None else dtype
        self._is_the_gradient = kind == first.dtype
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += -(-parameter.numel() * kind.itemsize // ALIGNED) * ALIGNED // kind.itemsize
        self._flat = torch.zeros(end, dtype=kind, device=first.device)
        self._places = {
            parameter: _place(self._flat, offset, parameter)
            for parameter, offset in zip(parameters, offsets, strict=True)
        }
        self._missing = set(parameters)
        self.handle: Any = None

    @property
    def begun(self) -> bool:
        return len(self._missing) < len(self._places)

    def put(self, parameter: nn.Parameter) -> None:
        """Its gradient, or zeros; with the last one the bucket is sent."""
        if parameter not in self._missing:
            raise HvdDDPError(
                "A second backward came before `backend.synchronize` and would add to gradients that are on their way. "
                "Do all backwards of a step but the last in `backend.no_sync(wrapped)`."
            )
        place, gradient = self._places[parameter], parameter.grad
        if gradient is None:
            place.zero_()
        else:
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            torch.mul(gradient.detach(), self._scale, out=place)
        if self._is_the_gradient:
            parameter.grad = place
        self._missing.remove(parameter)
        if not self._missing:
            self.handle = self._start(self._flat, self._name)

    def complete(self) -> None:
        """Send it, whatever has come."""
        for parameter in list(self._missing):
            self.put(parameter)

    def give_back(self) -> None:
        """Its parameters have what is in it for gradients; the next step may begin."""
        if not self._is_the_gradient:
            for parameter, place in self._places.items():
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(place)
        self._missing = set(self._places)
        self.handle = None


def _groups(model: nn.Module, limit: float) -> list[list[nn.Parameter]]:
    """Parameters that share a bucket: of one dtype on one device."""
    groups: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
    for parameter in reversed([parameter for parameter in model.parameters() if parameter.requires_grad]):
        group = groups.setdefault((parameter.dtype, parameter.device), [[]])
        if sum(other.nbytes for other in group[-1]) + parameter.nbytes > limit and group[-1]:
            group.append([])
        group[-1].append(parameter)
    return [parameters for group in groups.values() for parameters in group]


def _place(flat: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """Part of `flat` in which its gradient lies as the parameter itself does, if it has no gaps."""
    own = parameter.detach()
    if as_it_lies(own).is_contiguous():
        return flat.as_strided(own.shape, own.stride(), offset)
    return flat[offset : offset + own.numel()].view(own.shape)
