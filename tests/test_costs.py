"""What a step is said to take on many ranks, against rings that are run, clocks that tick, and torch's own buckets."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from hvd_ddp.costs import ALL_REDUCE, Costs, Gradient, Link, Move, buckets, exposed, exposed_on, ring, tree

LINK = Link(rate=10e9, latency=5e-6, goodput=0.9, host=0.2e-9)
ADDING = 0.1e-9


def costs(*gradients: tuple[float, int], step: float = 0.1, adding: float = 0.0) -> Costs:
    return Costs("m", "about", 8, step, adding, tuple(Gradient(*gradient) for gradient in gradients))


@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_one_rank_has_nobody_to_talk_to(algorithm: str) -> None:
    assert ALL_REDUCE[algorithm](1 << 20, 1, LINK, ADDING) == (0.0, 0.0)
    assert exposed_on(costs((0.05, 1 << 20)), 1, LINK, algorithm) == 0.0


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_ring_that_is_run(ranks: int) -> None:
    """Each rank holds numbers of its own; what the first one sends and adds until all hold the sums is counted."""
    data = np.arange(ranks * ranks * 4, dtype=np.float64).reshape(ranks, ranks, 4)  # rank, part, number
    wanted = data.sum(0)
    messages = numbers = added = 0
    for number in range(2 * (ranks - 1)):
        sent = [(rank, (rank - number) % ranks, data[rank, (rank - number) % ranks].copy()) for rank in range(ranks)]
        for rank, part, values in sent:
            to = (rank + 1) % ranks
            if number < ranks - 1:
                data[to, part] += values
                added += len(values) * (to == 0)
            else:
                data[to, part] = values
            messages, numbers = messages + (rank == 0), numbers + len(values) * (rank == 0)
    assert (data == wanted).all()
    move = ring(8 * wanted.size, ranks, LINK, ADDING)
    assert move.seconds == pytest.approx(messages * 5e-6 + 8 * numbers * 8 / 9e9)
    assert move.busy == pytest.approx(8 * numbers * 0.2e-9 + 8 * added * 0.1e-9)


@pytest.mark.parametrize("ranks", [2, 5, 64, 4096])
def test_a_tree_with_the_best_number_of_pieces(ranks: int) -> None:
    height, size = math.ceil(math.log2(ranks)), 1 << 24
    one_way = min((2 * height + 2 * k) * (5e-6 + size / (2 * k) * 8 / 9e9) for k in range(1, 20000))
    move = tree(size, ranks, LINK, ADDING)
    assert move.seconds == pytest.approx(2 * one_way, rel=1e-3)
    assert move.busy == pytest.approx(size * (2 * 0.2e-9 + 0.1e-9))


def test_where_a_tree_beats_a_ring() -> None:
    """A ring sends fewer bytes, a tree fewer messages."""
    few, many = 2, 4096
    assert ring(1 << 28, few, LINK, 0).seconds < tree(1 << 28, few, LINK, 0).seconds
    assert ring(1 << 20, many, LINK, 0).seconds > 10 * tree(1 << 20, many, LINK, 0).seconds


@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_the_slower_of_link_and_core_sets_the_pace(algorithm: str) -> None:
    slow_core = ALL_REDUCE[algorithm](1 << 24, 8, Link(1e12, host=2e-9), ADDING)
    assert slow_core.seconds == slow_core.busy > (1 << 24) * 2 * 7 / 8 * 2e-9
    slow_link = ALL_REDUCE[algorithm](1 << 24, 8, Link(1e9, host=2e-9), ADDING)
    assert (
        slow_link.busy == slow_core.busy
        and slow_link.seconds == ALL_REDUCE[algorithm](1 << 24, 8, Link(1e9), 0).seconds
    )


@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=40), first=st.integers(1, 4000), more=st.integers(1, 9000)
)
def test_buckets_are_those_of_ddp(sizes: list[int], first: int, more: int) -> None:
    tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [first, more], [False] * len(sizes))
    ours = buckets([Gradient(float(number), size) for number, size in enumerate(sizes)], first, more)
    assert [(bucket.ready, bucket.size) for bucket in ours] == [
        (max(numbers), sum(sizes[number] for number in numbers)) for numbers in theirs
    ]


def ticks(backward: int, ready: list[int], moves: list[tuple[int, int]]) -> int:
    """The same, a tick at a time: a rank, which computes unless its core is taken, and a line with one move on it.

    `moves`: how many ticks of each leave the core alone, and how many take it.
    """
    now = done = 0
    waiting, line = list(zip(ready, moves, strict=True)), [0, 0]
    while True:
        while line == [0, 0] and waiting and waiting[0][0] <= done:
            line = list(waiting.pop(0)[1])
        if line == [0, 0] and not waiting and done == backward:
            return now - backward
        if line[0] > 0 or line[1] == 0:
            done += done < backward
        line[0 if line[0] else 1] -= line != [0, 0]
        now += 1


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 30), st.integers(0, 10)), min_size=1, max_size=8))
def test_what_is_exposed_by_a_clock_that_ticks(steps: list[tuple[int, int, int]]) -> None:
    ready = np.cumsum([step[0] for step in steps]).tolist()
    moves = [step[1:] for step in steps]
    reduce = iter(Move(alone + taken, taken) for alone, taken in moves)
    filled = [Gradient(moment, 1) for moment in ready]
    assert exposed(ready[-1], filled, lambda _: next(reduce)) == ticks(ready[-1], ready, moves)


def test_limits() -> None:
    early, late = costs((0.01, 1 << 20), (0.05, 4)), costs((0.01, 4), (0.05, 1 << 20))
    fast, slow = Link(rate=1e15), Link(rate=8e6)
    assert exposed_on(early, 4096, fast, "ring") == pytest.approx(0, abs=1e-7)
    whole = (1 << 20) * 1e-6
    assert exposed_on(late, 2, slow, "ring") == pytest.approx(whole, rel=1e-4), "nothing left to hide behind"
    assert exposed_on(early, 2, slow, "ring") == pytest.approx(whole - 0.04, rel=1e-4), "hidden behind the rest"
    assert exposed_on(costs((0.05, 1 << 20), adding=1e-9), 2, fast, "ring") == pytest.approx(
        (1 << 20) * 0.5e-9, rel=0.01
    )


@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_what_is_more_is_not_hidden_better(algorithm: str) -> None:
    model = costs(*((0.002 * number, 1 << 19) for number in range(1, 40)), adding=ADDING)
    by_ranks = [exposed_on(model, 1 << number, LINK, algorithm) for number in range(13)]
    by_rate = [exposed_on(model, 64, Link(rate, 5e-6), algorithm) for rate in (400e9, 100e9, 10e9, 1e9)]
    by_latency = [exposed_on(model, 64, Link(10e9, latency), algorithm) for latency in (0, 1e-6, 1e-5, 1e-3)]
    for values in (by_ranks, by_rate, by_latency):
        assert values == sorted(values) and values[-1] > values[0] >= 0


def test_bucket_sizes_count() -> None:
    model = costs((0.01, 1 << 20), (0.05, 1 << 20))
    assert exposed_on(model, 2, Link(80e6), "ring") < exposed_on(model, 2, Link(80e6), "ring", bucket=1 << 22)


def test_a_faster_device() -> None:
    model = costs((0.02, 4), (0.05, 8), adding=ADDING).scaled(0.01)
    assert (model.step, model.backward) == (0.01, pytest.approx(0.005))
    assert model.gradients[0] == (pytest.approx(0.002), 4) and model.adding == pytest.approx(ADDING / 10)


def test_there_and_back() -> None:
    model = costs((0.02, 4), (0.05, 8), adding=ADDING)
    assert Costs.from_dict(json.loads(json.dumps(model.to_dict()))) == model


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"step": 0.04}, "in the order in which they are ready"),
        ({"step": math.nan}, "in the order"),
        ({"gradients": []}, "there must be gradients"),
        ({"gradients": [[0.02, 0]]}, "at least one byte"),
        ({"gradients": [[0.02, 10**400]]}, "at least one byte"),
        ({"gradients": [[0.02, 4], [0.01, 4]]}, "in the order"),
        ({"gradients": [[math.nan, 4], [0.01, 4]]}, "in the order"),
        ({"gradients": [[0.02]]}, "no pair"),
        ({"gradients": {}}, "gradients is a dict"),
        ({"adding": -1.0}, "adding takes"),
        ({"model": 3}, "model is a int"),
        ({"more": 3}, "nothing else"),
    ],
    ids=str,
)
def test_no_costs(change: dict[str, Any], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        Costs.from_dict(costs((0.02, 4), (0.05, 8)).to_dict() | change)
