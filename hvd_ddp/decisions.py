"""What evaluations decide: which model is the best, when the rate drops, when training ends early.

Evaluations are sums over all ranks, so that every rank decides the same without asking the others.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from hvd_ddp.config import TrainConfig


@dataclass
class Decisions:
    """The evaluations so far, as far as they count."""

    best: dict[str, Any] | None = None  # the best one: its step, and accuracy or, without one, loss
    stale: int = 0  # evaluations since then
    waited: int = 0  # evaluations since then, or since the rate dropped
    drops: int = 0  # of the rate, under --schedule plateau

    def take(self, config: TrainConfig, step: int, results: dict[str, float]) -> None:
        """Count the evaluation at `step`. The first of equals is the best; one that is no number is none."""
        name, sign = ("accuracy", 1) if "accuracy" in results else ("loss", -1)
        value, best = results.get(name, math.nan), self.best
        if math.isfinite(value) and (best is None or name not in best or sign * value > sign * best[name]):
            self.best, self.stale, self.waited = {"step": step, name: value}, 0, 0
            return
        self.stale, self.waited = self.stale + 1, self.waited + 1
        if config.schedule == "plateau" and self.waited >= config.patience:
            self.waited, self.drops = 0, self.drops + 1

    def end(self, config: TrainConfig) -> bool:
        """Whether training has gone on without a better model for as long as --early-stop says."""
        return config.early_stop is not None and self.stale >= config.early_stop

    def to_save(self) -> dict[str, Any]:
        """Plain types for a checkpoint."""
        return asdict(self)
