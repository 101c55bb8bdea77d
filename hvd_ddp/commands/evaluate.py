"""evaluate: a checkpoint over a data set, each sample once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvd_ddp.commands.trained import Choice, on_ranks, trained

if TYPE_CHECKING:
    from hvd_ddp.backends.base import Backend


@dataclass(frozen=True)
class Options(Choice):
    """Evaluate a checkpoint on the evaluation part of a data set: each sample once, over all ranks."""

    json: bool = False
    """Print one JSON object and nothing else."""


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp evaluate`."""
    return on_ranks("evaluate", Options, arguments, _evaluate)


def _evaluate(options: Options, backend: Backend) -> None:
    from hvd_ddp.banner import figures
    from hvd_ddp.evaluation import evaluate

    with trained(options, backend) as it:
        results = evaluate(it.model, it.feed, task=it.task, precision=it.numbers, backend=backend)
    if backend.is_main:
        print(json.dumps(results) if options.json else f"{options.checkpoint}: {figures(results)}", flush=True)
