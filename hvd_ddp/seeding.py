"""Random numbers follow from the seed and the step: nothing to save, nothing to restore."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_all(number: int, device: torch.device) -> None:
    """Seed torch, numpy's global generator and Python's `random`: whatever a model draws from. `number`: 64 bits.

    torch.manual_seed would format a stack for each kind of device that is not there: 70 us, where all this takes 8.
    """
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed for dropout and the like in one step of one rank."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    seed_all(int.from_bytes(digest, "big") >> 1, device)
