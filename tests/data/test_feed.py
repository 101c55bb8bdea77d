"""Any stops, any ranks, any batches: an epoch has each sample once, in the order that seed and epoch give."""

from itertools import chain

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ddp.config import TrainConfig
from hvd_ddp.data.arrays import ArrayDataset, Data
from hvd_ddp.data.feed import Feed, Place, Rank, feed
from hvd_ddp.data.permutation import permutation


def feeds(num_samples: int, global_batch: int, world_size: int, accumulate: int, seed: int) -> list[Feed]:
    """One for each rank; a sample is its number."""
    part = ArrayDataset(np.arange(num_samples, dtype=np.float64)[:, None], np.zeros(num_samples, np.int64))
    data = Data("numbers", part, part, 1, (0.0,), (1.0,))
    config = TrainConfig(global_batch=global_batch, accumulate=accumulate, seed=seed)
    device = torch.device("cpu")
    return [
        feed(config, data, Rank(rank, world_size, 1), device=device, dtype=torch.float64, agree=lambda counts: counts)
        for rank in range(world_size)
    ]


@settings(max_examples=150, deadline=None)
@given(
    num_samples=st.integers(1, 60),
    global_batch=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    starts=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=8),
)
def test_each_sample_once_an_epoch(
    num_samples: int, global_batch: int, seed: int, starts: list[tuple[int, int, int]]
) -> None:
    """`starts` are (steps until it is stopped, ranks, micro-batches)."""
    per_epoch = -(-num_samples // global_batch)
    place, done, seen = Place(), 0, list[list[int]]()
    for num_steps, world_size, accumulate in starts:
        ranks = feeds(num_samples, global_batch, world_size, accumulate, seed)
        assert all(rank.place(done, rank.to_save(place)) == place for rank in ranks)
        for steps in zip(*(rank.steps(place, num_steps) for rank in ranks), strict=True):
            micros = [micro for step in steps for micro in step.micros]
            assert len(micros) == world_size * accumulate
            seen.append([int(value) for micro in micros for value in micro.inputs[: micro.num_samples, 0]])
            assert {step.window for step in steps} == {len(seen[-1])} and len({step.place for step in steps}) == 1
            place, done = steps[0].place, done + 1
            assert place == Place((done - 1) // per_epoch, (done - 1) % per_epoch + 1, done % per_epoch == 0)
    for epoch in range(-(-done // per_epoch)):
        order = permutation(num_samples, seed, epoch)[:].tolist()
        found = list(chain(*seen[epoch * per_epoch : (epoch + 1) * per_epoch]))
        assert found == order[: len(found)]


@given(num_samples=st.integers(1, 700), world_size=st.integers(1, 5))
def test_evaluation_has_each_sample_once(num_samples: int, world_size: int) -> None:
    batches = chain(*(rank.evaluation_batches() for rank in feeds(num_samples, 1, world_size, 1, 0)))
    assert [int(value) for batch in batches for value in batch.inputs[:, 0]] == list(range(num_samples))
