"""What a run says of itself at its beginning and end."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from hvd_ddp.backends.base import Backend
from hvd_ddp.config import TrainConfig


def command_to_go_on(directory: Path) -> str:
    """What was typed, so that it goes on in this directory; under which launcher is the user's own choice."""
    arguments = sys.argv[1:]
    named = any(argument.split("=")[0] in ("--run-dir", "--run_dir") for argument in arguments)
    return shlex.join(["python", "-m", "hvd_ddp", *arguments, *([] if named else ["--run-dir", str(directory)])])


def figures(results: dict[str, Any]) -> str:
    """An evaluation's results in words."""
    known = ("steps", "epochs", "samples_per_second", "num_samples", "best", "phases", "seconds")
    text = ", ".join(f"{name} {value:.4f}" for name, value in results.items() if name not in known)
    return text + (f" on {results['num_samples']} samples" if "num_samples" in results else "")


def interval(row: dict[str, Any], evaluated: dict[str, float]) -> str:
    """A line of metrics in words, with what the last evaluation of this start found."""
    text = "epoch {epoch}  loss {loss:.4f}  lr {lr:.2e}  {samples_per_second:.0f} samples/s".format(**row)
    if "accuracy" in evaluated:
        text += "  evaluated: accuracy {accuracy:.4f}".format(**evaluated)
    if slow := row.get("slowest"):
        text += "  waiting for rank {rank} ({host}): {phase}, {seconds:.3f} s a step".format(**slow)
    return text


def ending(status: str, results: dict[str, Any], num_ranks: int, directory: Path) -> list[str]:
    """What the run has come to: a table, and its last line."""
    speed, best = results["samples_per_second"], dict(results["best"] or {})
    table = {
        "steps": f"{results['steps']:,}, {results['epochs']:.3g} epochs",
        "throughput": f"{speed:,.0f} samples/s, {speed / num_ranks:,.0f} a rank",
        "where the time went": ", ".join(
            f"{phase} {share:.0%}" for phase, share in results["phases"].items() if share >= 0.005
        ),
    }
    if best:
        step = best.pop("step")
        table["best evaluation"] = f"{figures(best)}, at step {step:,}"
    last = ", ".join(filter(None, [f"{speed:.0f} samples/s", figures(results)]))
    return [
        *(f"{name:20} {value}" for name, value in table.items()),
        f"{status}: {results['steps']} steps in {results['seconds']:.1f} s, {last}; {directory}",
    ]


def banner(config: TrainConfig, backend: Backend, directory: Path) -> list[str]:
    """What was seen, what was chosen and why, in per-rank and global numbers."""
    launch = backend.launch
    share = f"{config.global_batch / launch.world_size:g} a rank"
    augment = f" (augment {config.augment})" if config.augment != "none" else ""
    told = [f", {name.replace('_', ' ')} {value}" for name, value in backend.communication.given().items()]
    cut = f", in {config.accumulate} micro-batches" if config.accumulate > 1 else ""
    return [
        f"launcher {launch.launcher} ({launch.seen}), {launch.world_size} rank(s) on {', '.join(launch.nodes[:8])}"
        + (f" and {len(launch.nodes) - 8} more" if len(launch.nodes) > 8 else ""),
        f"backend {backend.name} ({backend.why}), transport {backend.transport}, device {backend.device}, "
        f"{torch.get_num_threads()} thread(s) a rank{''.join(told)}",
        f"data {config.data}{augment}, model {config.model}, "
        f"{config.optimizer} at {config.lr:g}, {config.precision}; "
        f"global batch {config.global_batch}: {share}{cut}",
        f"run directory {directory}",
    ]
