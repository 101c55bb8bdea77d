"""The order of the samples in an epoch."""

import numpy as np
from numpy.typing import NDArray

from hvd_ddp.data.hashing import key, mix

LARGE = 16_000_000  # samples from which on an order is computed where it is used: randperm takes 8 bytes for each
_ROUNDS = 12  # below 10, pairs of samples are visibly not uniform in sets of 16


class KeyedOrder:
    """A permutation of range(num_samples) of which any slice is computed by itself, in memory for that slice alone.

    A Feistel network on the fewest bits that hold `num_samples`, cut into two halves as equal as can be: round after
    round one half is xored with a keyed hash of the other, which can be undone whatever the hash. Results beyond
    `num_samples` go through it again until they fall within (cycle walking; fewer than two passes on average), which
    leaves a permutation of the numbers within. Source: Black, Rogaway, "Ciphers with Arbitrary Finite Domains",
    CT-RSA 2002, methods 2 and 3; the round function is splitmix64's, so the order is shuffled, not secret.

    Raises ValueError for a size outside 1..2**62.
    """

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        if not 1 <= num_samples <= 2**62:
            raise ValueError(f"num_samples is {num_samples}, not within 1..2**62")
        self.num_samples = num_samples
        self._keys = [key(f"hvd_ddp large order {seed} {epoch} {number}") for number in range(_ROUNDS)]
        num_bits = (num_samples - 1).bit_length()
        self._low_bits = (num_bits + 1) // 2
        self._low, self._high = 2**self._low_bits - 1, 2 ** (num_bits // 2) - 1  # masks

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, positions: slice) -> NDArray[np.int64]:
        """The samples at `positions`, int64 (n,)."""
        found = self._encrypt(np.arange(*positions.indices(self.num_samples), dtype=np.int64))
        while len(outside := np.flatnonzero(found >= self.num_samples)):
            found[outside] = self._encrypt(found[outside])
        return found

    def _encrypt(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """One pass: a permutation of all numbers that the bits can hold."""
        high, low = numbers >> self._low_bits, numbers & self._low
        for number, round_key in enumerate(self._keys):
            if number % 2:
                high ^= mix(low ^ round_key) & self._high
            else:
                low ^= mix(high ^ round_key) & self._low
        numbers = high << self._low_bits | low
        return numbers


def permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64] | KeyedOrder:
    """The order of the samples in that epoch; slices of it are int64. Leaves torch's global generator alone."""
    if num_samples >= LARGE:
        return KeyedOrder(num_samples, seed, epoch)
    import torch

    generator = torch.Generator().manual_seed((key(f"hvd_ddp order {seed} {epoch}") % 2**64) >> 1)
    # The device is named, for torch.set_default_device would move it.
    order: NDArray[np.int64] = torch.randperm(num_samples, generator=generator, device="cpu").numpy()
    return order
