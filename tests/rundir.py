"""What a run left in its directory."""

import json
from pathlib import Path
from typing import Any

import torch


def newest(run: Path) -> dict[str, Any]:
    """The newest checkpoint."""
    state: dict[str, Any] = torch.load(sorted((run / "checkpoints").glob("step_*.pt"))[-1], weights_only=True)
    return state


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The step, parameters, buffers and the optimizer's state of a checkpoint, by name."""
    found = {f"model.{name}": value for name, value in state["model"].items()}
    for index, entry in state["optimizer"]["state"].items():
        found |= {f"optimizer.{index}.{name}": value for name, value in entry.items()}
    return {"step": torch.tensor(state["progress"]["step"]), **found}


def different(mine: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that differ in a bit."""
    assert mine.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(mine[name], wanted[name])]


def distance(mine: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest norm(a - b) / norm(b) of a tensor."""
    assert mine.keys() == wanted.keys()
    pairs = [(mine[name].double(), wanted[name].double()) for name in wanted]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-300)) for a, b in pairs)


def rows(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of these kinds, as far as they are written; none before there is a file."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [line for line in found if line["kind"] in kinds]


def last_step(run: Path) -> int:
    """That metrics.jsonl tells of so far; 0 before there is one."""
    return max([row["step"] for row in rows(run, "train", "eval", "save", "resume", "preempt")], default=0)


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found
