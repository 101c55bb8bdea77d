"""parity: a rank of one way. It trains as `train` does, and writes down each step: what it was shown, what came out.

`python -m hvd_ddp parity rank OPTIONS.yaml NOTES REFERENCE`, which `parity` starts.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hvd_ddp.commands.train import config_of, parse, train
from hvd_ddp.data.loader import Batch
from hvd_ddp.job.launch import is_speaker
from hvd_ddp.seeding import seed_step
from hvd_ddp.trainer import Trainer


class Recording(Trainer):
    """After each step a line in `notes/rank-<rank>.jsonl`; rank 0 of the first way leaves its tensors in `reference`.

    A line has the hash of each sample that the model was shown, in order, and why the result depends on how samples are
    shared out; that of rank 0 how far its parameters and buffers are from the reference, where they differ.
    """

    def __init__(self, *parts: Any, notes: Path, reference: Path) -> None:
        super().__init__(*parts)
        self._reference = reference
        self._is_reference = notes == reference
        self._notes = notes / f"rank-{self.backend.launch.rank}.jsonl"

    def train_step(self, micros: list[Batch], window: int) -> None:
        """The trainer's own, then the line."""
        step = self.step
        super().train_step(micros, window)
        line: dict[str, Any] = {
            "step": self.step,
            "samples": [digest for micro in micros for digest in _digests(micro)],
            "shares": self._depends_on_shares(step),
        }
        if self.backend.is_main:
            line["distances"] = self._compare()
        with self._notes.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _depends_on_shares(self, step: int) -> list[str]:
        found = []
        normed = any(isinstance(module, _BatchNorm) for module in self.model.modules())
        if normed and not (self.config.sync_bn and self.config.accumulate == 1):
            found.append("BatchNorm")
        drawn = _generators(self.backend.device)  # they were seeded when the step began
        seed_step(self.config.seed, step, self.backend.launch.rank, self.backend.device)
        if drawn != _generators(self.backend.device):
            found.append("random numbers, such as dropout's")
        if getattr(self.data.train, "sharded", False):
            found.append("a stream for each rank")
        return found

    def _compare(self) -> dict[str, float]:
        """norm(a - b) / norm(b) of each tensor that differs; of the reference itself: none, and it is saved."""
        mine = {f"parameter `{name}`": value.detach() for name, value in self.model.named_parameters()}
        mine |= {f"buffer `{name}`": value for name, value in self.model.named_buffers()}
        mine = {name: value.cpu() for name, value in mine.items()}
        path = self._reference / f"step-{self.step:08d}.pt"
        if self._is_reference:
            torch.save(mine, path)
            return {}
        try:
            wanted = torch.load(path, mmap=True, weights_only=True)
        except FileNotFoundError:
            return {"another number of steps": math.inf}
        return {name: _distance(value, wanted[name]) for name, value in mine.items() if _differ(value, wanted[name])}


def _digests(batch: Batch) -> list[str]:
    """A hash of each sample with its target, as the model is shown it; none for a stand-in."""
    pairs = zip(*(part.cpu().numpy()[: batch.num_samples] for part in batch[:2]), strict=True)
    return [hashlib.blake2b(sample.tobytes() + target.tobytes(), digest_size=8).hexdigest() for sample, target in pairs]


def _generators(device: torch.device) -> list[Any]:
    """Where torch's, numpy's and Python's random generators are."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return [*(state.numpy().tobytes() for state in states), repr(np.random.get_state()), random.getstate()]


def _differ(mine: Tensor, wanted: Tensor) -> bool:
    return mine.shape != wanted.shape or mine.dtype != wanted.dtype or not torch.equal(mine, wanted)


def _distance(mine: Tensor, wanted: Tensor) -> float:
    """In the 2-norm, relative; infinite where there is nothing to relate it to, or a number is not finite."""
    if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
        return math.inf
    kind = torch.complex128 if mine.is_complex() else torch.float64
    a, b = mine.to(kind), wanted.to(kind)
    distance = float((a - b).norm() / b.norm())
    return distance if math.isfinite(distance) else math.inf


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp parity rank`."""
    options, notes, reference = map(Path, arguments)
    config = config_of(parse(["--config", str(options)], show_errors=is_speaker()))
    return train(config, partial(Recording, notes=notes, reference=reference))
