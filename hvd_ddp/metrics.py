"""Sums on the device, one reduction."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_ddp.backends.base import Backend


class Sums:
    """Named sums in float64 on the device; no host synchronisation until `reduce`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor | float) -> None:
        """Add a scalar to the sum of that name."""
        if name not in self._sums:
            self._sums[name] = torch.zeros((), dtype=torch.float64, device=self._device)
        self._sums[name] += value.detach() if isinstance(value, Tensor) else value

    def reduce(self, backend: Backend, names: list[str]) -> dict[str, float]:
        """The sums over all ranks, in one all_reduce; starts again from zero.

        `names` must be the same on every rank: a rank without samples has added nothing.
        """
        for name in names:
            self.add(name, 0.0)
        totals = backend.all_reduce(torch.stack([self._sums[name] for name in names])).tolist()
        self._sums.clear()
        return dict(zip(names, totals, strict=True))
