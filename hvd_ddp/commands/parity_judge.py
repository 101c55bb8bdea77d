"""parity: what two ways have to agree in, and where they differ first."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvd_ddp.history import read


@dataclass(frozen=True)
class Trace:
    """What one way left of each step."""

    device: str
    losses: dict[int, float]  # step -> mean over its samples, of all ranks; NaN where it was not finite
    samples: dict[int, list[str]]  # step -> a hash of each, in the order of the global batch
    distances: dict[int, dict[str, float]]  # step -> distance to the reference of each tensor that differs
    shares: list[str]  # why the result depends on how samples are shared out


@dataclass(frozen=True)
class Row:
    """A way and the largest differences to the reference; NaN where nothing was compared."""

    name: str
    backend: str
    transport: str
    num_ranks: int
    is_reference: bool = False
    weights: float = math.nan
    buffers: float = math.nan
    loss: float = math.nan
    samples_differ_at: int | None = None  # step
    limit: float | None = None
    why_not_judged: str = ""
    first: tuple[int, str] | None = None  # step, and what differs in it by more than the limit
    error: str = ""

    @property
    def judged(self) -> bool:
        """Whether anything has to agree."""
        return not self.is_reference and not self.why_not_judged

    @property
    def equal(self) -> bool:
        """Whether all agrees that has to."""
        return not self.error and (not self.judged or self.first is None)

    def cells(self) -> list[str]:
        """For the table."""
        if self.error or self.is_reference:
            word = "failed" if self.error else "reference"
            return [self.name, str(self.num_ranks), "", "", "", "", word]
        numbers = ["0" if value == 0 else f"{value:.1e}" for value in (self.weights, self.buffers, self.loss)]
        samples = "same" if self.samples_differ_at is None else f"others at {self.samples_differ_at}"
        agrees = "same bits" if self.limit == 0 else f"within {self.limit or 0:g}"
        word = "not judged" if self.why_not_judged else agrees if self.equal else "DIFFERS"
        return [self.name, str(self.num_ranks), *numbers, samples, word]

    def in_words(self) -> str:
        """What the table does not tell; empty where it tells all."""
        if self.error:
            return f"failed. {self.error}"
        if self.why_not_judged:
            return f"not judged: {self.why_not_judged}."
        return f"differs first in step {self.first[0]}: {self.first[1]}." if self.first else ""

    def to_dict(self) -> dict[str, Any]:
        """For --json: null where nothing was compared, or where a difference is not finite."""
        values = {"weight": self.weights, "buffer": self.buffers, "loss": self.loss}
        values = {name: 0.0 if self.is_reference else value for name, value in values.items()}
        return {
            "backend": self.backend,
            "transport": self.transport,
            "ranks": self.num_ranks,
            **{f"max_{name}_difference": value if math.isfinite(value) else None for name, value in values.items()},
            "same_samples": None if self.error else self.samples_differ_at is None,
            "tolerance": self.limit,
            "judged": self.judged,
            "first_difference": {"step": self.first[0], "what": self.first[1]} if self.first else None,
            "error": self.error or None,
        }


def read_trace(notes: Path, run: Path) -> Trace:
    """What the ranks of a way wrote down, and its run directory."""
    files = sorted(notes.glob("rank-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    ranks = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    history = read(run)
    return Trace(
        device=str(history.facts["device"]),
        losses={row["step"]: math.nan if row["loss"] is None else row["loss"] for row in history.train},
        samples={
            lines[0]["step"]: [s for line in lines for s in line["samples"]] for lines in zip(*ranks, strict=True)
        },
        distances={line["step"]: line["distances"] for line in ranks[0]},
        shares=sorted({reason for lines in ranks for line in lines for reason in line["shares"]}),
    )


def judge(row: Row, trace: Trace, reference: Trace, limit: float | None, *, same_shares: bool) -> Row:
    """The row, filled in. `limit` is None where no agreement is promised; `same_shares`: of as many ranks."""
    why = ""
    if reference.shares and not same_shares:
        why = f"it depends on how samples are shared out ({', '.join(reference.shares)})"
    elif limit is None:
        why = "sums come in another order or compressed; --precision fp64, or fp32 with sgd, bounds the former alone"
    steps = sorted(trace.losses.keys() | reference.losses.keys())
    losses = {step: _relative(trace.losses.get(step), reference.losses.get(step)) for step in steps}
    others = [step for step in steps if trace.samples.get(step) != reference.samples.get(step)]
    distances = [item for found in trace.distances.values() for item in found.items()]
    first = None
    for step in steps if limit is not None and not why else []:
        words = ["other samples"] if step in others else []
        words += _beyond(limit or 0.0, losses[step], trace.distances.get(step, {}))
        if words and first is None:
            first = (step, "; ".join(words))
    return replace(
        row,
        weights=max((distance for name, distance in distances if not name.startswith("buffer")), default=0.0),
        buffers=max((distance for name, distance in distances if name.startswith("buffer")), default=0.0),
        loss=max(losses.values(), default=0.0),
        samples_differ_at=others[0] if others else None,
        limit=limit,
        why_not_judged=why,
        first=first,
    )


def _beyond(limit: float, loss: float, distances: dict[str, float]) -> list[str]:
    """In words, what of one step is farther away than that; of tensors the farthest."""
    words = [f"loss by {loss:.1e}"] if not loss <= limit else []
    far = sorted((name for name in distances if not distances[name] <= limit), key=lambda name: -distances[name])
    if far:
        words.append(f"{far[0]} by {distances[far[0]]:.1e}" + (f" and {len(far) - 1} more" if far[1:] else ""))
    return words


def _relative(mine: float | None, wanted: float | None) -> float:
    """Infinite where one is missing, or only one is finite."""
    if mine is None or wanted is None:
        return math.inf
    if mine == wanted or (math.isnan(mine) and math.isnan(wanted)):
        return 0.0
    distance = abs(mine - wanted) / abs(wanted) if wanted else math.inf
    return distance if math.isfinite(distance) else math.inf
