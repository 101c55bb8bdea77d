"""Where the time goes: how much of it a rank spends in each phase, and which rank the others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What a rank does on its own. From backward on its times tell nothing: all have waited there for the slowest.
ALONE = ("loading data", "forward")
BEHIND = 0.1  # of the time: less is the noise of a machine


def alone(seconds: Mapping[str, float]) -> list[float]:
    """The time in each phase of ALONE."""
    return [seconds.get(phase, 0.0) for phase in ALONE]


def slowest(
    table: NDArray[np.float64], hosts: Sequence[str], *, seconds: float, num_steps: int
) -> dict[str, Any] | None:
    """The rank that the others wait for, its host, the phase, and by how many seconds a step; None without one.

    `table` is (world_size, len(ALONE)): the seconds of each rank in each phase, in an interval of so many `seconds`.
    A rank is compared with the median of the others. With collectives inside forward (SyncBatchNorm) all seem alike.
    """
    if len(table) < 2:
        return None
    rank = int(table.sum(1).argmax())
    more = table[rank] - np.median(np.delete(table, rank, axis=0), axis=0)
    if more.sum() < BEHIND * seconds:
        return None
    facts = {"rank": rank, "host": hosts[rank], "phase": ALONE[int(more.argmax())]}
    return {**facts, "seconds": float(more.sum()) / max(num_steps, 1)}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """The share of each phase, largest first, as far as it is at least a thousandth."""
    total = sum(seconds.values()) or 1.0
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return {phase: round(spent / total, 4) for phase, spent in ordered if spent >= 0.001 * total}
