"""Samples read one at a time: what comes out follows from (seed, epoch, sample), whoever reads them and when."""

import random
import threading

import numpy as np
import own_data
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ddp.config import TrainConfig
from hvd_ddp.data.arrays import Data
from hvd_ddp.data.datasets import load
from hvd_ddp.data.feed import Place, Rank, feed
from hvd_ddp.data.items import Reader, Request
from hvd_ddp.data.own import OwnItems, OwnStream
from hvd_ddp.errors import HvdDDPError

START = Place()


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch):
    """The ranks of these tests are threads, which share Python's and numpy's generators; real ones don't."""
    lock, read = threading.Lock(), Reader.__call__

    def locked(self, *arguments, **options):
        with lock:
            return read(self, *arguments, **options)

    monkeypatch.setattr(Reader, "__call__", locked)


def reader(*parts, skip_bad=False, num_classes=3, rank=0, world_size=1):
    return Reader(parts, num_classes, 5, False, skip_bad, rank, world_size)


def jittered():
    return OwnItems("jittered", own_data.jittered(None)[0])


def request(*indices, epoch=0, part=0):
    return Request(part, np.array(indices, np.int64), epoch)


def test_what_is_random_follows_from_seed_epoch_and_sample():
    read = reader(jittered(), jittered())
    all_ = read(request(*range(100))).inputs
    for index in (0, 17, 99):
        assert torch.equal(read(request(index)).inputs[0], all_[index])
    noise = all_[:, 0] - torch.arange(100)
    assert len(set(noise.tolist())) > 95 and noise.min() > 0 and noise.max() < 3
    assert not torch.equal(read(request(3, epoch=1)).inputs[0], all_[3])
    assert not torch.equal(read(request(3, part=1)).inputs[0], all_[3])


def test_reading_leaves_the_generators_alone():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    reader(jittered())(request(1, 2))
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_bad_samples_end_the_job_or_are_counted():
    items = OwnItems("faulty", own_data.faulty(None)[0])
    with pytest.raises(OSError, match="no sample 3"):
        reader(items)(request(2, 3))
    piece = reader(items, skip_bad=True)(request(2, 3, 4, 7))
    assert piece.samples.tolist() == [2, 4] and len(piece.inputs) == 2
    assert piece.bad == ["`faulty`, sample 3: OSError('no sample 3')", "`faulty`, sample 7: OSError('no sample 7')"]


def test_what_does_not_fit_is_named():
    ragged = own_data.Items([(torch.zeros(3), 0), (torch.zeros(4), 0), (torch.zeros(3), 3), (torch.zeros(3), -1)])
    read = reader(OwnItems("ragged", ragged))
    with pytest.raises(HvdDDPError, match=r"float32 `\(3,\)` as its first sample and float32 `\(4,\)` as its sample 1"):
        read(request(0, 1))
    for index, label in ((2, 3), (3, -1)):
        with pytest.raises(HvdDDPError, match=rf"class `{label}` at sample {index}, with 3 classes"):
            read(request(index))


# ---- a row of samples


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=8))
def test_any_places_of_a_row_can_be_asked_for(asked):
    """In any order: forwards it goes on, backwards it begins anew; behind the end there is nothing."""
    read = reader(OwnStream("stream", own_data.Stream(50)))
    for first, num, epoch in asked:
        piece = read(Request(0, np.arange(first, first + num), epoch))
        assert piece.samples.tolist() == list(range(first, min(first + num, 50)))
        assert piece.inputs[:, 0].tolist() == piece.samples.tolist() and set(piece.inputs[:, 2].tolist()) <= {epoch}
        alone = [reader(OwnStream("stream", own_data.Stream(50)))(request(i, epoch=epoch)) for i in piece.samples[:2]]
        assert all(torch.equal(one.inputs[0], mine) for one, mine in zip(alone, piece.inputs, strict=False))


def feeds(factory, world_size, *, global_batch=8, accumulate=1, workers=0):
    """A feed of each rank, each by itself."""
    config = TrainConfig(
        data=f"own_data:{factory}", global_batch=global_batch, accumulate=accumulate, workers=workers, max_steps=1
    )
    train, evaluation, num_classes = getattr(own_data, factory)(None)
    parts = [
        OwnStream(name, part) if isinstance(part, own_data.Stream) else OwnItems(name, part)
        for name, part in (("train", train), ("eval", evaluation))
    ]
    data = Data(factory, *parts, num_classes, (0.0,), (1.0,))
    numbers = {"device": torch.device("cpu"), "dtype": torch.float32, "agree": lambda counts: counts}
    return [feed(config, data, Rank(rank, world_size, world_size), **numbers) for rank in range(world_size)]


def run(factory, world_size, num, *, place=START, **options):
    """`num` steps on threads that meet for each agreement: a list of steps a rank."""
    barrier, box, results = threading.Barrier(world_size), {}, [None] * world_size

    def meet(rank, counts):
        box[rank] = counts
        barrier.wait(20)
        sums = [sum(column) for column in zip(*box.values(), strict=True)]
        barrier.wait(20)
        return sums

    def one(rank):
        mine = feeds(factory, world_size, **options)[rank]
        mine._agree = lambda counts: meet(rank, counts)
        results[rank] = list(mine.steps(place, num))

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert None not in results
    return results


def numbers(step):
    return [int(row[0]) for batch in step.micros for row in batch.inputs[: batch.num_samples]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_common_stream_is_the_same_on_any_number_of_ranks(world_size):
    """50 samples in steps of 8: 6 whole ones and one of 2; then the next epoch, after the same step on all ranks."""
    ranks = run("stream", world_size, 16, accumulate=2)
    for step in range(16):
        epoch, position = divmod(step, 7)
        wanted = list(range(50))[8 * position : 8 * position + 8]
        assert [number for rank in ranks for number in numbers(rank[step])] == wanted
        for rank in ranks:
            assert rank[step].window == len(wanted)
            assert rank[step].place == Place(epoch, position + 1, position == 6)
            assert len(rank[step].micros) == 2


def test_no_sample_of_unequal_streams_is_lost():
    """20, 21 and 22 samples, 3 a step for two ranks and 2 for the third (8 in all): the longest has 11 steps."""
    ranks = run("shards", 3, 11)
    for rank in range(3):
        seen = [number for step in ranks[rank] for number in numbers(step)]
        assert seen == [index * 3 + rank for index in range(20 + rank)]
    windows = [[step.window for step in rank] for rank in ranks]
    assert windows[0] == windows[1] == windows[2] and sum(windows[0]) == 63
    assert [step.place.ended for step in ranks[0]] == [False] * 10 + [True]
    assert ranks[0][-1].micros[0].num_samples == 0  # takes part with weight zero


@pytest.mark.parametrize("factory", ["stream", "shards"])
def test_a_stream_goes_on_where_it_was(factory):
    whole = run(factory, 2, 20)
    for done in (1, 5, 8, 13):
        place = whole[0][done - 1].place
        rest = run(factory, 2, 20 - done, place=place)
        for rank in range(2):
            for mine, wanted in zip(rest[rank], whole[rank][done:], strict=True):
                assert (mine.window, mine.place) == (wanted.window, wanted.place)
                assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(mine.micros, wanted.micros, strict=True))


def test_streams_of_other_ranks_are_refused_in_mid_epoch():
    two, three = feeds("shards", 2)[0], feeds("shards", 3)[0]
    with pytest.raises(HvdDDPError, match=r"in the middle of an epoch by `2` ranks.*Go on with 2 ranks"):
        three.place(5, two.to_save(Place(0, 5)))
    assert three.place(11, two.to_save(Place(0, 11, True))) == Place(0, 11, True)
    assert feeds("stream", 3)[0].place(5, feeds("stream", 2)[0].to_save(Place(0, 5))) == Place(0, 5)


@pytest.mark.parametrize(("factory", "num"), [("stream", 10), ("shards", 5), ("stream_and_items", 7)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_of_streams_counts_each_once(factory, num, world_size):
    made = feeds(factory, world_size)
    per_rank = [sum(batch.num_samples for batch in one.evaluation_batches()) for one in made]
    wanted = world_size * 5 + sum(range(world_size)) if factory == "shards" else num
    assert sum(per_rank) == wanted


def test_an_empty_epoch_does_not_spin():
    class Once(own_data.Stream):
        def __iter__(self):
            return super().__iter__() if self.epoch == 0 else iter(())

    data = Data("once", OwnStream("train", Once(5)), OwnStream("eval", Once(5)), 3, (0.0,), (1.0,))
    one = feed(
        TrainConfig(global_batch=2, max_steps=9), data, Rank(0, 1, 1),
        device=torch.device("cpu"), dtype=torch.float32, agree=lambda counts: counts,
    )  # fmt: skip
    with pytest.raises(HvdDDPError, match="no sample in epoch 1"):
        list(one.steps(Place(), 9))


def test_classes_of_own_data_are_those_of_the_factory(monkeypatch):
    monkeypatch.syspath_prepend(str(own_data.__file__).rpartition("/")[0])
    data = load("own_data:stream")
    assert data.num_classes == 3 and data.num_train is None and data.image_shape == (3,)
