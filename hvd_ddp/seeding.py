"""Random numbers of a step follow from the step: nothing to save, nothing to restore."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed torch, numpy's global generator and Python's `random`, for dropout and whatever else a model draws.

    torch.manual_seed would format a stack for each kind of device that is not there, 0.1 ms a step.
    """
    number = int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest(), "big") >> 1
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)
