import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_ddp.data.sampler import GlobalBatchSampler, permutation, share

sizes = st.integers(1, 300)
batches = st.integers(1, 320)
worlds = st.integers(1, 9)
seeds = st.integers(0, 2**64)
epochs = st.integers(0, 10**6)


def job(num_samples, global_batch, world_size, **numbers):
    """What each rank sees: a list a rank of (indices, total)."""
    return [
        list(GlobalBatchSampler(num_samples, global_batch, rank=rank, world_size=world_size, **numbers))
        for rank in range(world_size)
    ]


@given(total=st.integers(0, 10**12), world_size=st.integers(1, 50))
def test_shares_cover_everything_in_order(total, world_size):
    parts = [share(total, rank, world_size) for rank in range(world_size)]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == total
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@given(num_samples=sizes, global_batch=batches, world_size=worlds, seed=seeds, epoch=epochs)
def test_every_sample_once_an_epoch(num_samples, global_batch, world_size, seed, epoch):
    ranks = job(num_samples, global_batch, world_size, seed=seed, epoch=epoch)
    used = np.concatenate([indices for steps in ranks for indices, _ in steps])
    assert used.dtype == np.int64
    assert sorted(used) == list(range(num_samples))
    assert {len(steps) for steps in ranks} == {-(-num_samples // global_batch)}
    for step in zip(*ranks, strict=True):
        assert {total for _, total in step} == {sum(len(indices) for indices, _ in step)}
    assert [total for _, total in ranks[0][:-1]] == [global_batch] * (len(ranks[0]) - 1)


@given(num_samples=sizes, global_batch=batches, one=worlds, other=worlds, seed=seeds, epoch=epochs)
def test_steps_do_not_depend_on_the_number_of_ranks(num_samples, global_batch, one, other, seed, epoch):
    def steps(world_size):
        ranks = job(num_samples, global_batch, world_size, seed=seed, epoch=epoch)
        return [np.concatenate([indices for indices, _ in step]).tolist() for step in zip(*ranks, strict=True)]

    assert steps(one) == steps(other)


@given(data=st.data(), num_samples=sizes, global_batch=st.integers(1, 40), seed=seeds, epoch=epochs)
def test_every_sample_once_across_stops_on_other_numbers_of_ranks(data, num_samples, global_batch, seed, epoch):
    num_steps = -(-num_samples // global_batch)
    stops = sorted(data.draw(st.lists(st.integers(0, num_steps), max_size=4)))
    used = []
    for start, stop in zip([0, *stops], [*stops, num_steps], strict=True):
        world_size = data.draw(worlds)
        for steps in job(num_samples, global_batch, world_size, seed=seed, epoch=epoch, start=start):
            assert len(steps) == num_steps - start
            used.extend(index for indices, _ in steps[: stop - start] for index in indices)
    assert sorted(used) == list(range(num_samples))


def test_length_does_not_depend_on_start():
    for start in range(5):
        sampler = GlobalBatchSampler(10, 3, rank=0, world_size=2, seed=0, epoch=0, start=start)
        assert len(sampler) == 4 and len(list(sampler)) == 4 - start


def test_iterating_again_gives_the_same():
    sampler = GlobalBatchSampler(50, 7, rank=1, world_size=3, seed=5, epoch=2)
    first, second = ([indices.tolist() for indices, _ in sampler] for _ in range(2))
    assert first == second


def test_ranks_without_samples_take_part():
    ranks = job(3, 2, 4, seed=0, epoch=0)
    assert [[len(indices) for indices, _ in steps] for steps in ranks] == [[1, 1], [1, 0], [0, 0], [0, 0]]
    assert [total for _, total in ranks[3]] == [2, 1]


def test_orders_differ_by_seed_and_epoch():
    orders = {tuple(permutation(100, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert tuple(permutation(100, 1, 23)) != tuple(permutation(100, 12, 3))


def test_the_order_is_this_one():
    """A run that resumes under another version must find the order that it began with."""
    assert permutation(10, 0, 0).tolist() == [6, 4, 0, 8, 9, 5, 3, 2, 1, 7]


def test_torch_state_plays_no_part():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    order = permutation(100, 3, 4)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    with torch.device("meta"):
        np.testing.assert_array_equal(permutation(100, 3, 4), order)


@pytest.mark.parametrize(
    "change",
    [
        {"num_samples": 0},
        {"global_batch": 0},
        {"rank": -1},
        {"rank": 2},
        {"world_size": 0},
        {"epoch": -1},
        {"start": -1},
        {"start": 5},
    ],
    ids=str,
)
def test_bad_numbers_are_refused(change):
    good = {"num_samples": 10, "global_batch": 3, "rank": 0, "world_size": 2, "seed": 0, "epoch": 0, "start": 4}
    GlobalBatchSampler(**good)
    with pytest.raises(ValueError, match=next(iter(change))):
        GlobalBatchSampler(**good | change)


def test_bad_shares_are_refused():
    for numbers in ((-1, 0, 1), (5, 1, 1), (5, -1, 2), (5, 0, 0)):
        with pytest.raises(ValueError, match="not"):
            share(*numbers)
