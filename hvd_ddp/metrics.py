"""Sums on the device, one reduction a line of metrics."""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from hvd_ddp.backends.base import Backend
from hvd_ddp.data.loader import Batch


class Sums:
    """Named sums in float64 on the device; no host synchronisation until `reduce`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor | float] = {}  # a number of the host stays one until it is asked for

    def add(self, name: str, value: Tensor | float) -> None:
        """Add a scalar to the sum of that name."""
        own = value.detach().double() if isinstance(value, Tensor) else value
        self._sums[name] = self._sums.get(name, 0.0) + own

    def reduce(self, backend: Backend, names: list[str]) -> dict[str, float]:
        """The sums over all ranks, in one all_reduce; starts again from zero.

        `names` must be the same on every rank: a rank without samples has added nothing.
        """
        for name in names:
            self.add(name, 0.0)
        sums = [torch.as_tensor(self._sums[name], dtype=torch.float64, device=self._device) for name in names]
        totals = backend.all_reduce(torch.stack(sums)).tolist()
        self._sums.clear()
        return dict(zip(names, totals, strict=True))


class Interval:
    """What happened since the last line of metrics: sums over the samples and steps of all ranks, and time."""

    def __init__(self, device: torch.device) -> None:
        self._sums = Sums(device)
        self._began, self._waited = time.perf_counter(), 0.0

    def step(self, loss: Tensor, micros: list[Batch]) -> None:
        """Count a step of this rank: the sum of the losses of its samples."""
        self._sums.add("loss", loss)
        self._sums.add("num_samples", sum(micro.num_samples for micro in micros))
        if num_bad := sum(micro.num_bad for micro in micros):
            self._sums.add("num_bad", num_bad)

    def skipped(self) -> None:
        """Count a step of all ranks that was skipped."""
        self._sums.add("num_skipped", 1)

    def waited(self, seconds: float) -> None:
        """Count time for which this rank had no batch."""
        self._waited += seconds

    def row(self, backend: Backend) -> dict[str, float]:
        """The means over the interval, in one reduction; a new one begins."""
        sums = self._sums.reduce(backend, ["loss", "num_samples", "num_bad", "num_skipped"])
        now = time.perf_counter()
        seconds, waited = now - self._began, self._waited
        self._began, self._waited = now, 0.0
        row = {
            "loss": sums["loss"] / sums["num_samples"] if sums["num_samples"] else math.nan,
            "samples_per_second": sums["num_samples"] / seconds,
            "data_wait": waited / seconds,  # share of the time, on this rank
        }
        if sums["num_bad"]:
            row["bad_samples"] = int(sums["num_bad"])
        if sums["num_skipped"]:
            row["skipped_steps"] = round(sums["num_skipped"] / backend.launch.world_size)
        return row
