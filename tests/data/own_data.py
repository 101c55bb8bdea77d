"""Data for --data own_data:NAME."""

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
    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + torch.rand(()), target


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(3), 0


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


def stream(data_dir):
    return Stream(), Stream()


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


def three_things(data_dir):
    return whole(Items([(torch.zeros(3), 0, 0)] * 3))


def words(data_dir):
    return whole(Items([("a word", 0)] * 3))


def jittered(data_dir):
    return whole(Jittered([(torch.zeros(3), 0)] * 3))


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


def huge(data_dir):
    class Huge(Items):
        def __len__(self):
            return 10**9

        def __getitem__(self, index):
            return torch.zeros(3, 32, 32), 0

    return whole(Huge([]))
