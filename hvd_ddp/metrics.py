"""Sums on the device, one reduction a line of metrics."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvd_ddp.anatomy import ALONE, alone, shares, slowest
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

    def take(self, names: Sequence[str]) -> Tensor:
        """The sums of these names, float64 (n,); starts again from zero. A rank without samples has added nothing."""
        taken = [torch.as_tensor(self._sums.get(name, 0.0), dtype=torch.float64, device=self._device) for name in names]
        self._sums.clear()
        return torch.stack(taken)

    def reduce(self, backend: Backend, names: Sequence[str]) -> dict[str, float]:
        """The sums over all ranks, in one all_reduce. `names` must be the same on every rank."""
        return dict(zip(names, backend.all_reduce(self.take(names)).tolist(), strict=True))


class Interval:
    """What happened since the last line of metrics: sums over the samples and steps of all ranks, and time."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._sums = Sums(backend.device)
        self._num_steps, self._began = 0, time.perf_counter()
        self._seconds = Counter[str]()
        backend.meeting.pulse.lap()  # from here on it is ours

    def step(self, loss: Tensor, micros: list[Batch]) -> None:
        """Count a step of this rank: the sum of the losses of its samples."""
        self._sums.add("loss", loss)
        self._sums.add("num_samples", sum(micro.num_samples for micro in micros))
        if num_bad := sum(micro.num_bad for micro in micros):
            self._sums.add("num_bad", num_bad)
        self._num_steps += 1

    def skipped(self) -> None:
        """Count a step of all ranks that was skipped."""
        self._sums.add("num_skipped", 1)

    def row(self) -> dict[str, Any]:
        """The means over the interval and where its time went, in one reduction; a new one begins."""
        backend, launch, lap = self._backend, self._backend.launch, self._backend.meeting.pulse.lap()
        self._seconds.update(lap)
        names = ("loss", "num_samples", "num_bad", "num_skipped")
        table = torch.zeros(launch.world_size, len(ALONE), dtype=torch.float64)
        table[launch.rank] = torch.tensor(alone(lap), dtype=torch.float64)
        sums, times = backend.all_reduce(torch.cat([self._sums.take(names), table.flatten().to(backend.device)])).split(
            [len(names), table.numel()]
        )
        loss, num_samples, num_bad, num_skipped = sums.tolist()
        now = time.perf_counter()
        seconds, num_steps = now - self._began, self._num_steps
        self._began, self._num_steps = now, 0
        behind = slowest(
            times.view(table.shape).cpu().numpy(), launch.hosts or (), seconds=seconds, num_steps=num_steps
        )
        return {
            "loss": loss / num_samples if num_samples else math.nan,
            "samples_per_second": num_samples / seconds,
            "data_wait": lap.get("loading data", 0.0) / seconds,  # share of the time, on this rank
            "phases": shares(lap),  # the same of each phase
            **({"slowest": behind} if behind else {}),
            **({"bad_samples": int(num_bad)} if num_bad else {}),
            **({"skipped_steps": round(num_skipped / launch.world_size)} if num_skipped else {}),
        }

    def phases(self) -> dict[str, float]:
        """Share of each phase in the time of this rank so far."""
        self._seconds.update(self._backend.meeting.pulse.lap())
        return shares(self._seconds)
