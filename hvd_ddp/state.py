"""Whether a checkpoint holds what `train` writes, before it is used: who can write a file can write its hash as well.

Types and ranges are looked at here; whether it fits the model is seen where it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hvd_ddp.errors import HvdDDPError

MOST = 1 << 62  # steps, samples: more overflow somewhere
PLACE = {"epoch", "position", "ended", "world_size"}
LATER = {"ema", "decisions", "place"}  # which checkpoints did not have from the first
DECISIONS = {"best", "stale", "waited", "drops"}


def check_state(state: dict[str, Any], origin: str) -> None:
    """Raise HvdDDPError that names the first field of a run's state that is missing or is none."""
    checks: dict[str, Callable[[Any], bool]] = {
        "model": lambda value: _table(value),
        "ema": lambda value: _table(value) and all(isinstance(v, Tensor) for v in value.values()),
        "optimizer": _is_optimizer,
        "scaler": lambda value: _table(value) and all(_is_number(v) for v in value.values()),
        "decisions": is_decisions,
        "progress": _is_progress,
        "place": lambda value: _table(value) and value.keys() <= PLACE and _counts(*value.values()),
        "total_steps": _counts,
        "config": is_config,
        "data": lambda value: _table(value) and _is_number_of_samples(value.get("num_samples", "")),
    }
    for name, fits in checks.items():
        if (name in state or name not in LATER) and not fits(state.get(name)):
            raise HvdDDPError(
                f"`{origin}` holds no `{name}` such as train writes it: it was made by something else, or changed. "
                "Use another checkpoint, or take its weights alone with --init."
            )


def is_config(value: Any) -> bool:
    """Names of options, each with one plain value."""
    return _table(value) and all(v is None or isinstance(v, bool | int | float | str) for v in value.values())


def is_decisions(value: Any) -> bool:
    """What `Decisions.to_save` gives."""
    if not _table(value) or not value.keys() <= DECISIONS:
        return False
    counts, best = [v for name, v in value.items() if name != "best"], value.get("best")
    return _counts(*counts) and (
        best is None or (_table(best) and _counts(best.get("step")) and all(_is_number(v) for v in best.values()))
    )


def _is_progress(value: Any) -> bool:
    if not _table(value) or not _counts(value.get("step"), value.get("updates")):
        return False
    evaluated_at = value.get("evaluated_at", -1)  # -1: never
    return value["updates"] <= value["step"] and type(evaluated_at) is int and -1 <= evaluated_at < MOST


def _is_optimizer(value: Any) -> bool:
    if not _table(value) or not isinstance(value.get("state"), dict) or not isinstance(value.get("param_groups"), list):
        return False
    return all(type(key) is int and _table(entry) for key, entry in value["state"].items()) and all(
        map(_table, value["param_groups"])
    )


def _table(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _counts(*values: Any) -> bool:
    return all(isinstance(value, int) and 0 <= value < MOST for value in values)


def _is_number_of_samples(value: Any) -> bool:
    return value is None or _counts(value)  # None: of a stream


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < MOST and math.isfinite(value)
