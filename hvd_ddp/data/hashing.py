"""Random numbers without a state: each follows from what it is for, so any can be had without those before it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Numbers = TypeVar("Numbers", NDArray[np.int64], "Tensor")

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # the step between two states of splitmix64


def key(text: str) -> int:
    """64 bits that follow from `text`, as a signed number."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def mix(state: Numbers) -> Numbers:
    """The output of splitmix64 for each state: a bijection of 64 bits whose result looks random.

    int64 of any shape, array or tensor on any device, the same bits in each: products wrap around, and arithmetic
    shifts are masked into logical ones. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014, with the constants of Vigna's splitmix64.c.
    """
    state = (state ^ ((state >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    state = (state ^ ((state >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return state ^ ((state >> 31) & (2**33 - 1))


def uniform(number: int, count: int) -> list[float]:
    """`count` random numbers in [0, 1) that follow from `number`, 64 bits: the splitmix64 stream that begins there."""
    states = np.arange(1, count + 1, dtype=np.int64) * GOLDEN + number
    bits: list[int] = ((mix(states) >> 11) & (2**53 - 1)).tolist()
    return [value / 2**53 for value in bits]
