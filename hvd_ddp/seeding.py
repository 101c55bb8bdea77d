"""Random numbers follow from the seed and the step: nothing to save, nothing to restore."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def seed_generators(number: int) -> None:
    """Let all that may be drawn from Python's, numpy's and torch's (CPU) generators follow from `number`.

    torch.manual_seed would format a stack for each kind of device that is not there: 70 us, where all this takes 8.
    """
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number % 2**64)


def seed_all(number: int, device: torch.device) -> None:
    """And from the generators of GPUs."""
    seed_generators(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed for dropout and the like in one step of one rank."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    seed_all(int.from_bytes(digest, "big") >> 1, device)
