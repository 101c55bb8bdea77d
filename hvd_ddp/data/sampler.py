"""Which samples each rank uses in each step: a pure function of a few numbers, with no state between epochs."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hvd_ddp.data.permutation import permutation


def share(total: int, rank: int, world_size: int) -> slice:
    """The part of range(total) that falls to `rank`: contiguous, in rank order, sizes differ by at most one.

    The first ranks have the one more. Raises ValueError for a total below 0 or a rank outside 0..world_size-1.
    """
    if total < 0:
        raise ValueError(f"total is {total}, not at least 0")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, not within 0..{world_size - 1} (world_size {world_size})")
    size, extra = divmod(total, world_size)
    first = rank * size + min(rank, extra)
    return slice(first, first + size + (rank < extra))


class GlobalBatchSampler:
    """The steps of one epoch, as one rank sees them.

    Step s uses the positions [s*G, (s+1)*G) of the epoch's permutation, G being `global_batch`, and each rank its share
    of them: the order depends on (seed, epoch) alone. The last step has what is left. Of a large set this computes only
    this rank's share of each step. Iterating gives steps `start` onwards; it may be done again and gives the same.
    Raises ValueError for numbers that make no sense.
    """

    def __init__(
        self, num_samples: int, global_batch: int, *, rank: int, world_size: int, seed: int, epoch: int, start: int = 0
    ) -> None:
        if num_samples < 1 or global_batch < 1:
            raise ValueError(f"num_samples is {num_samples}, global_batch {global_batch}: both are at least 1")
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}, not at least 0")
        share(0, rank, world_size)  # refuses a bad rank now, not in the first step
        self.num_samples, self.global_batch = num_samples, global_batch
        self.rank, self.world_size = rank, world_size
        self.seed, self.epoch, self.start = seed, epoch, start
        if not 0 <= start <= len(self):
            raise ValueError(f"start is {start}, not within 0..{len(self)}, the steps of an epoch")

    def __len__(self) -> int:
        """Steps in the whole epoch, whatever `start` is."""
        return -(-self.num_samples // self.global_batch)

    def __iter__(self) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Per step: the indices of this rank's samples, int64 (n,), n may be 0; and how many samples all ranks use."""
        order = permutation(self.num_samples, self.seed, self.epoch)
        for step in range(self.start, len(self)):
            first = step * self.global_batch
            total = min(self.global_batch, self.num_samples - first)
            part = share(total, self.rank, self.world_size)
            yield order[first + part.start : first + part.stop], total
