"""The order of large sets: a permutation, uniform, and computed only where it is used."""

import math
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ddp.data import permutation as module
from hvd_ddp.data.permutation import LARGE, KeyedOrder, permutation
from hvd_ddp.data.sampler import GlobalBatchSampler

SIZES = [*range(1, 70), 127, 128, 129, 1000, 4095, 4096, 4097, 65_535, 65_536, 65_537, 524_289, 999_983, 1_000_000]
seeds, epochs = st.integers(0, 2**64), st.integers(0, 10**6)


def deviation(counts: np.ndarray) -> float:
    """By how many standard deviations chi-square of these counts, all equally likely, exceeds its mean."""
    wanted = counts.sum() / counts.size
    assert wanted >= 5
    free = counts.size - 1
    return float(((counts - wanted) ** 2 / wanted).sum() - free) / math.sqrt(2 * free)


@pytest.mark.parametrize("num_samples", SIZES)
def test_it_is_a_bijection(num_samples):
    order = KeyedOrder(num_samples, 3, 1)
    assert len(order) == num_samples
    assert order[:].dtype == np.int64
    assert np.array_equal(np.sort(order[:]), np.arange(num_samples))


@settings(deadline=None)  # the machine may be busy
@given(num_samples=st.integers(1, 3000), seed=seeds, epoch=epochs)
def test_it_is_a_bijection_of_any_size_with_any_key(num_samples, seed, epoch):
    assert np.array_equal(np.sort(KeyedOrder(num_samples, seed, epoch)[:]), np.arange(num_samples))


@settings(deadline=None)  # the machine may be busy
@given(data=st.data(), num_samples=st.integers(1, 5000), seed=seeds, epoch=epochs)
def test_slices_equal_the_whole(data, num_samples, seed, epoch):
    order = KeyedOrder(num_samples, seed, epoch)
    first = data.draw(st.integers(0, num_samples))
    last = data.draw(st.integers(first, num_samples))
    assert np.array_equal(order[first:last], order[:][first:last])


@pytest.mark.parametrize("num_samples", [LARGE, 10**9, 2**40 + 1, 2**62])
def test_slices_of_large_sets_are_distinct_and_within(num_samples):
    order = KeyedOrder(num_samples, 0, 0)
    part = order[num_samples - 100_000 :]
    assert part.min() >= 0 and part.max() < num_samples and len(np.unique(part)) == 100_000
    assert np.array_equal(part[-1000:], order[num_samples - 1000 :])


@pytest.mark.parametrize("num_samples", [10, 16, 23])
def test_each_order_of_few_is_as_likely(num_samples):
    """Which sample is at which position, and which two are neighbours: all as often, over 6,000 fixed keys."""
    at = np.zeros((num_samples, num_samples))
    first, last = np.zeros_like(at), np.zeros_like(at)
    for seed in range(6000):
        order = KeyedOrder(num_samples, seed, 0)[:]
        at[np.arange(num_samples), order] += 1
        first[order[0], order[1]] += 1
        last[order[-2], order[-1]] += 1
    others = ~np.eye(num_samples, dtype=bool)
    # Rows of `at` are tied to its columns, so its chi-square is a little smaller than for counts of their own.
    assert deviation(at) < 3
    assert deviation(first[others]) < 3
    assert deviation(last[others]) < 3


@pytest.mark.parametrize("num_samples", [999_983, LARGE, 10**9])
def test_a_slice_of_a_large_set_is_uniform(num_samples):
    """Its samples over the set, each with its neighbour, with its distance to it, and in the lowest bits."""
    part = KeyedOrder(num_samples, 5, 2)[num_samples // 3 : num_samples // 3 + 200_000]
    where = part * 40 // num_samples
    assert deviation(np.bincount(where, minlength=40)) < 4
    assert deviation(np.bincount(where[:-1] * 40 + where[1:], minlength=1600)) < 4
    assert deviation(np.bincount((part[1:] - part[:-1]) % num_samples * 40 // num_samples, minlength=40)) < 4
    assert deviation(np.bincount(part % 64, minlength=64)) < 4


def test_another_key_is_another_order():
    orders = {tuple(KeyedOrder(50, seed, epoch)[:]) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    assert tuple(KeyedOrder(50, 1, 23)[:]) != tuple(KeyedOrder(50, 12, 3)[:])
    one, other = KeyedOrder(10**6, 0, 0)[:], KeyedOrder(10**6, 0, 1)[:]
    assert (one == other).sum() < 10  # one on average


def test_the_order_is_this_one():
    """A run that resumes under another version must find the order that it began with."""
    assert KeyedOrder(10, 0, 0)[:].tolist() == [5, 8, 4, 1, 0, 2, 9, 3, 6, 7]
    assert KeyedOrder(10**9, 0, 0)[7:10].tolist() == [962161314, 964369342, 362531409]


def test_large_sets_have_it_and_small_ones_do_not():
    assert isinstance(permutation(LARGE, 0, 0), KeyedOrder)
    assert isinstance(permutation(LARGE - 1, 0, 0), np.ndarray)


def test_the_first_batch_of_a_billion_costs_a_batch(monkeypatch, record_property):
    """At any step of any epoch, on any rank: memory for its share, and fewer than three passes for each sample."""
    num_samples, ranks, global_batch = 10**9, 1024, 65_536
    counted = []
    encrypt = KeyedOrder._encrypt
    monkeypatch.setattr(
        KeyedOrder, "_encrypt", lambda self, numbers: counted.append(len(numbers)) or encrypt(self, numbers)
    )
    last = -(-num_samples // global_batch) - 1
    for rank, epoch, start in [(0, 0, 0), (1023, 7, last // 2), (512, 10**6, last)]:
        counted.clear()
        tracemalloc.start()
        began = time.perf_counter()
        sampler = GlobalBatchSampler(
            num_samples, global_batch, rank=rank, world_size=ranks, seed=1, epoch=epoch, start=start
        )
        indices, total = next(iter(sampler))
        seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        record_property(f"milliseconds_at_step_{start}", seconds * 1e3)  # not asserted: the machine may be busy
        print(f"step {start}: {seconds * 1e3:.2f} ms, {peak / 1e3:.0f} kB")
        assert total == (global_batch if start < last else num_samples % global_batch)
        assert len(indices) in (total // ranks, total // ranks + 1)
        assert peak < 100_000
        assert sum(counted) < 3 * len(indices)


@settings(deadline=None, max_examples=40)  # the machine may be busy
@given(data=st.data(), num_samples=st.integers(1, 300), global_batch=st.integers(1, 40), seed=seeds, epoch=epochs)
def test_every_sample_once_across_stops_on_other_numbers_of_ranks(data, num_samples, global_batch, seed, epoch):
    """As for the small sets (test_sampler.py), with the order of the large ones."""
    num_steps = -(-num_samples // global_batch)
    stops = sorted(data.draw(st.lists(st.integers(0, num_steps), max_size=4)))
    used, before = [], module.LARGE
    module.LARGE = 1
    try:
        for start, stop in zip([0, *stops], [*stops, num_steps], strict=True):
            world_size = data.draw(st.integers(1, 9))
            ranks = [
                GlobalBatchSampler(
                    num_samples, global_batch, rank=rank, world_size=world_size, seed=seed, epoch=epoch, start=start
                )
                for rank in range(world_size)
            ]
            for steps in list(zip(*ranks, strict=True))[: stop - start]:
                used.extend(index for indices, _ in steps for index in indices)
                assert {total for _, total in steps} == {sum(len(indices) for indices, _ in steps)}
    finally:
        module.LARGE = before
    assert used == KeyedOrder(num_samples, seed, epoch)[:].tolist()


@pytest.mark.parametrize("num_samples", [0, -1, 2**62 + 1])
def test_sizes_that_do_not_fit_are_refused(num_samples):
    with pytest.raises(ValueError, match="num_samples"):
        KeyedOrder(num_samples, 0, 0)
