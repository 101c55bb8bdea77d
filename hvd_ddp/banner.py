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
    known = ("steps", "epochs", "samples_per_second", "num_samples", "best", "phases")
    text = ", ".join(f"{name} {value:.4f}" for name, value in results.items() if name not in known)
    return text + (f" on {results['num_samples']} samples" if "num_samples" in results else "")


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
