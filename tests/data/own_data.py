"""Data for --data own_data:NAME."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from hvd_ddp.data.arrays import ArrayDataset


class Items(Dataset):
    """Items by number."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Jittered(Items):
    """Each of the three generators that a transform may use."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + torch.rand(()) + np.random.rand() + random.random(), target


class Stream(IterableDataset):
    """`num` samples that hold their number, behind it noise, and the epoch."""

    def __init__(self, num):
        self.num, self.epoch = num, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in range(self.num):
            yield torch.tensor([index, random.random(), self.epoch]), index % 3


class Shards(Stream):
    """Each rank has one more than the rank before it."""

    def shard(self, rank, world_size):
        for index in range(self.num + rank):
            yield torch.tensor([index * world_size + rank, random.random(), self.epoch]), index % 3


class Faulty(Items):
    def __getitem__(self, index):
        if index in (3, 7):
            raise OSError(f"no sample {index}")
        return super().__getitem__(index)


def classes(num, num_classes=3):
    return torch.arange(num) % num_classes


def floats(num=12, shape=(5,), dtype=torch.float32):
    return torch.randn(num, *shape, generator=torch.Generator().manual_seed(num), dtype=dtype)


def tensors(data_dir):
    return TensorDataset(floats(), classes(12)), TensorDataset(floats(6), classes(6))


def separable(data_dir):
    """Two clouds in the plane."""
    parts = []
    for num in (256, 64):
        targets = classes(num, 2)
        parts.append(TensorDataset(floats(num, (2,)) + 6.0 * targets[:, None], targets))
    return tuple(parts)


def images(data_dir):
    pixels = torch.arange(12 * 3 * 4 * 5).reshape(12, 3, 4, 5).to(torch.uint8)
    return TensorDataset(pixels, classes(12)), TensorDataset(pixels[:6], classes(6)), 7


def grey(data_dir):
    pixels = np.zeros((12, 4, 5), np.uint8)
    part = Items([(pixels[index], index % 3) for index in range(12)])
    return part, part


def pictures(data_dir):
    from PIL import Image

    pixels = np.arange(12 * 4 * 5 * 3).reshape(12, 4, 5, 3).astype(np.uint8)
    part = Items([(Image.fromarray(pixels[index]), index % 3) for index in range(12)])
    return part, part


def grey_pictures(data_dir):
    from PIL import Image

    part = Items([(Image.fromarray(np.full((4, 5), index, np.uint8)), index % 3) for index in range(12)])
    return part, part


def items(data_dir):
    part = Items([(floats(1)[0], torch.tensor(index % 3)) for index in range(12)])
    return part, part


def arrays(data_dir):
    part = ArrayDataset(np.zeros((12, 1, 4, 5), np.uint8), np.arange(12))
    return part, part


def mapped(data_dir):
    pixels = np.lib.format.open_memmap(data_dir / "pixels.npy", "w+", np.uint8, (12, 1, 4, 5))
    pixels[:] = 9
    pixels.flush()
    part = ArrayDataset(np.load(data_dir / "pixels.npy", mmap_mode="r"), np.arange(12))
    return part, part


def jittered(data_dir):
    part = Jittered([(torch.full((64,), float(index)), index % 3) for index in range(100)])
    return part, part, 3


def stream(data_dir):
    return Stream(50), Stream(10), 3


def shards(data_dir):
    return Shards(20), Shards(5), 3


def stream_and_items(data_dir):
    return Stream(50), Items([(torch.zeros(3), 0)] * 7), 3


def faulty(data_dir):
    part = Faulty([(torch.zeros(64), index % 3) for index in range(12)])
    return part, part, 3


def faulty_three(data_dir):
    part = Faulty([(torch.zeros(3), index % 3) for index in range(12)])
    return part, part, 3


def with_classes(data_dir):
    part = Items([(torch.zeros(3), 0)] * 5)
    part.classes = ["a", "b", "c", "d"]
    return part, part


# Faulty ones


def whole(part):
    return part, part


def takes_nothing():
    return tensors(None)


def none(data_dir):
    return None


def single(data_dir):
    return TensorDataset(floats(), classes(12))


def four(data_dir):
    return (1, 2, 3, 4)


def stream_alone(data_dir):
    return Stream(50), Stream(10)


def empty_stream(data_dir):
    return Stream(0), Stream(0), 3


def empty(data_dir):
    return whole(Items([]))


def no_data_sets(data_dir):
    return 3, 4


def regression(data_dir):
    return whole(TensorDataset(floats(), torch.randn(12)))


def one_hot(data_dir):
    return whole(TensorDataset(floats(), torch.eye(12, dtype=torch.int64)))


def one_hot_items(data_dir):
    return whole(Items([(torch.zeros(3), torch.zeros(4)) for _ in range(3)]))


def tokens(data_dir):
    return whole(TensorDataset(torch.zeros(12, 5, dtype=torch.int64), classes(12)))


def flat_pixels(data_dir):
    return whole(TensorDataset(torch.zeros(12, 5, dtype=torch.uint8), classes(12)))


def ragged(data_dir):
    return whole(Items([(torch.zeros(3 + index), 0) for index in range(3)]))


def ragged_targets(data_dir):
    return whole(Items([(torch.zeros(3), torch.zeros((1,) * index, dtype=torch.int64)) for index in range(3)]))


def targets_differ(data_dir):
    return TensorDataset(floats(), classes(12)), TensorDataset(floats(), torch.zeros(12))


def three_things(data_dir):
    return whole(Items([(torch.zeros(3), 0, 0)] * 3))


def words(data_dir):
    return whole(Items([("a word", 0)] * 3))


def label(data_dir):
    return *whole(TensorDataset(floats(), classes(12, 5))), 4


def negative(data_dir):
    return whole(TensorDataset(floats(), classes(12) - 1))


def parts_differ(data_dir):
    return TensorDataset(floats(), classes(12)), TensorDataset(floats(6, (4,)), classes(6))


def no_classes(data_dir):
    return *tensors(data_dir), "ten"


def lengths(data_dir):
    return whole(TensorDatasetOfTwoLengths())


class TensorDatasetOfTwoLengths(TensorDataset):
    def __init__(self):
        self.tensors = (floats(), classes(11))


def local(data_dir):
    class Local(Items):
        """Can't be pickled."""

    return *whole(Local([(torch.zeros(64), 0)] * 100)), 3
