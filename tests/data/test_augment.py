"""How a sample looks: the same in any batch, on any number of ranks; fused, torch and torchvision agree bit for bit."""

import builtins
import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ddp.assemble import check
from hvd_ddp.config import TrainConfig
from hvd_ddp.data.arrays import ArrayDataset, Data, channel_statistics
from hvd_ddp.data.augment import DRAWS, Augmentation, choose
from hvd_ddp.data.hashing import key, mix
from hvd_ddp.data.loader import ArrayLoader
from hvd_ddp.data.sampler import GlobalBatchSampler
from hvd_ddp.errors import HvdDDPError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
STANDARD = Augmentation(7, padding=(4, 4), flip=True)


def dataset(num=40, channels=3, height=9, width=7):
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (num, channels, height, width), dtype=np.uint8)
    return ArrayDataset(images, random.integers(0, 10, num))


def loader(augment, data=None, dtype=torch.float32, device="cpu"):
    data = data or dataset()
    mean, std = channel_statistics(data.images)
    return ArrayLoader(data, augment, mean=mean, std=std, device=device, dtype=dtype)


def by_torch(augment, data=None, dtype=torch.float32):
    """A loader as on other devices."""
    made = loader(augment, data, dtype)
    assert made._preprocess._fused is not None
    made._preprocess._fused = None
    return made


def inputs(made, indices, epoch=0, accumulate=1):
    return torch.cat([batch.inputs for batch in made.micro_batches(np.asarray(indices), accumulate, epoch)])


def splitmix64(seed, number):
    """The published generator, in Python's whole numbers: its output after `number` others."""
    state = (seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def plainly(images, mean, std, draws, augment):
    """One image by loops over its pixels, in float32."""
    top, left, flip, cut_y, cut_x = draws
    channels, height, width = images.shape
    out = np.zeros(images.shape, np.float32)
    for y in range(height):
        for x in range(width):
            row = y + top - augment.padding[0]
            column = (width - 1 - x if flip else x) + left - augment.padding[1]
            inside = 0 <= row < height and 0 <= column < width
            cut = 0 <= y - cut_y + augment.cutout // 2 < augment.cutout
            cut = cut and 0 <= x - cut_x + augment.cutout // 2 < augment.cutout
            for channel in range(channels):
                pixel = np.float32(images[channel, row, column] if inside else 0)
                value = (pixel - np.float32(mean[channel])) / np.float32(std[channel])
                out[channel, y, x] = 0 if cut else value
    return out


def test_splitmix64_is_the_published_one():
    assert [hex(splitmix64(1234567, number)) for number in range(3)] == [
        "0x599ed017fb08fc85", "0x2c73f08458540fa5", "0x883ebce5a3f27c77",
    ]  # fmt: skip


@given(states=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_array_and_tensor_mix_the_same(states):
    wanted = [splitmix64((state - 0x9E3779B97F4A7C15) % 2**64, 0) for state in states]
    assert (mix(np.array(states)).astype(np.uint64)).tolist() == wanted
    assert [value % 2**64 for value in mix(torch.tensor(states)).tolist()] == wanted


@settings(deadline=None)
@given(
    samples=st.lists(st.integers(0, 2**50), min_size=1, max_size=20),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 10**6),
    padding=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    flip=st.booleans(),
)
def test_draws_are_those_of_the_documentation(samples, seed, epoch, padding, flip):
    drawn = Augmentation(seed, padding, flip).draw(torch.tensor(samples), epoch, height=31, width=17)
    ranges = [2 * padding[0] + 1, 2 * padding[1] + 1, 1 + flip, 31, 17]
    stream = key(f"hvd_ddp augment {seed} {epoch}")
    wanted = [[(splitmix64(stream, i * 16 + d) >> 32) * ranges[d] >> 32 for d in range(5)] for i in samples]
    assert drawn.dtype == torch.int64 and drawn.tolist() == wanted and len(DRAWS) == 5


def test_draws_are_uniform_and_independent():
    """Over samples, and over epochs of one sample; each alone and each with each other, also with the next sample's."""
    augment = Augmentation(0, (4, 4), flip=True)
    over_samples = augment.draw(torch.arange(40_000), 0, height=8, width=8)
    over_epochs = torch.cat([augment.draw(torch.tensor([5]), epoch, height=8, width=8) for epoch in range(8000)])
    ranges = [9, 9, 2, 8, 8]
    for drawn in (over_samples, over_epochs):
        both = torch.cat([drawn[:-1], drawn[1:]], dim=1).numpy()
        for one in range(5):
            for other in range(one + 1, 10):
                size = ranges[one] * ranges[other % 5]
                counts = np.bincount(both[:, one] * ranges[other % 5] + both[:, other], minlength=size)
                assert len(counts) == size
                excess = ((counts - len(both) / size) ** 2).sum() * size / len(both) - (size - 1)
                assert excess < 4.5 * (2 * (size - 1)) ** 0.5, (one, other)


AUGMENTATIONS = [
    Augmentation(0),
    STANDARD,
    Augmentation(1, padding=(1, 3), flip=True, cutout=4),
    Augmentation(2, padding=(0, 2), cutout=3),
    Augmentation(3, padding=(30, 20), flip=True, cutout=50),  # beyond the image
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("augment", AUGMENTATIONS, ids=str)
def test_fused_equals_torch(augment, dtype):
    indices = np.random.default_rng(0).integers(0, 40, 200)
    for data in (dataset(), dataset(channels=1, height=1, width=5), dataset(height=8, width=1), dataset(height=33)):
        one, other = (
            inputs(loader(augment, data, dtype), indices, 3),
            inputs(by_torch(augment, data, dtype), indices, 3),
        )
        assert one.dtype == dtype and one.is_contiguous()
        assert torch.equal(one, other)


@pytest.mark.parametrize("augment", AUGMENTATIONS, ids=str)
def test_values_are_those_of_plain_loops(augment):
    data = dataset()
    mean, std = channel_statistics(data.images)
    draws = augment.draw(torch.arange(40), 2, height=9, width=7).tolist()
    wanted = [plainly(data.images[i], mean, std, draws[i], augment) for i in range(40)]
    np.testing.assert_array_equal(inputs(loader(augment, data), range(40), 2).numpy(), wanted)


def test_crop_and_flip_are_those_of_torchvision():
    from torchvision.transforms.v2 import functional

    data = dataset(height=32, width=32)
    mean, std = channel_statistics(data.images)
    means, stds = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    draws = STANDARD.draw(torch.arange(40), 5, height=32, width=32)
    assert draws[:, 2].unique().tolist() == [0, 1] and draws[:, :2].unique().tolist() == list(range(9))
    shown = inputs(loader(STANDARD, data), range(40), 5)
    for image, (top, left, flip, _, _), mine in zip(torch.from_numpy(data.images), draws.tolist(), shown, strict=True):
        crop = functional.crop(functional.pad(image, [4, 4, 4, 4]), top, left, 32, 32)
        theirs = functional.horizontal_flip(crop) if flip else crop
        assert torch.equal(mine, (theirs.float() - means) / stds)


def test_without_any_change_it_is_the_plain_loader():
    indices = np.arange(40)
    for dtype in DTYPES:
        assert torch.equal(
            inputs(loader(Augmentation(0), dtype=dtype), indices), inputs(loader(None, dtype=dtype), indices)
        )


def test_evaluation_is_never_augmented():
    plain, augmented = loader(None), loader(STANDARD)
    for one, other in zip(
        plain.evaluation_batches(rank=0, world_size=1), augmented.evaluation_batches(rank=0, world_size=1), strict=True
    ):
        assert torch.equal(one.inputs, other.inputs)


def test_another_epoch_seed_or_sample_looks_different():
    same = ArrayDataset(np.repeat(dataset(1, height=32, width=32).images, 50, axis=0), np.zeros(50, np.int64))
    shown = [
        inputs(loader(Augmentation(seed, (4, 4), flip=True), same), range(50), epoch)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    looks = {tuple(image.flatten().tolist()) for batch in shown for image in batch}
    assert len(looks) > 100  # of 162 that there are
    assert not any(torch.equal(one, other) for one in shown for other in shown if one is not other)


@settings(deadline=None, max_examples=60)
@given(
    data=st.data(),
    num_samples=st.integers(1, 60),
    global_batch=st.integers(1, 70),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 99),
)
def test_every_sample_once_and_with_its_look_across_stops_on_other_numbers_of_ranks(
    data, num_samples, global_batch, seed, epoch
):
    """With any number of ranks and micro-batches in between: each id once an epoch, as it looks alone."""
    images = dataset(num_samples, 1, 6, 5).images
    images[:, 0, 0, 0] = 0  # so that padding 0 alone keeps the ids apart
    samples = ArrayDataset(images, np.arange(num_samples))
    augment = Augmentation(seed, (2, 1), flip=True)
    made = loader(augment, samples)
    alone = [inputs(made, [index], epoch)[0] for index in range(num_samples)]
    num_steps = -(-num_samples // global_batch)
    stops = sorted(data.draw(st.lists(st.integers(0, num_steps), max_size=3)))
    used = []
    for start, stop in zip([0, *stops], [*stops, num_steps], strict=True):
        world_size, accumulate = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
        for rank in range(world_size):
            sampler = GlobalBatchSampler(
                num_samples, global_batch, rank=rank, world_size=world_size, seed=seed, epoch=epoch, start=start
            )
            for step, (indices, _) in enumerate(sampler, start):
                for batch in made.micro_batches(indices, accumulate, epoch) if step < stop else []:
                    for target, look in zip(batch.targets[: batch.num_samples].tolist(), batch.inputs, strict=False):
                        used.append(target)
                        assert torch.equal(look, alone[target])
    assert sorted(used) == list(range(num_samples))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_shows_the_same(dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for augment in AUGMENTATIONS:
        there = inputs(loader(augment, dtype=dtype, device="cuda"), range(40), 1)
        assert torch.equal(there.cpu(), inputs(loader(augment, dtype=dtype), range(40), 1))


def test_memory_mapped_images_are_not_copied(tmp_path):
    data = dataset()
    np.save(tmp_path / "images.npy", data.images)
    mapped = ArrayDataset(np.load(tmp_path / "images.npy", mmap_mode="r"), data.targets)
    made = loader(STANDARD, mapped)
    assert made._images.data_ptr() == mapped.images.ctypes.data
    assert torch.equal(inputs(made, range(40)), inputs(loader(STANDARD, data), range(40)))


def test_without_numba_it_is_slower_and_the_same(monkeypatch, caplog):
    wanted = inputs(loader(STANDARD), range(40))
    before = builtins.__import__

    def refuse(name, *arguments, **named):
        if name == "numba":
            raise ImportError("Numba needs NumPy 1.2 or less")
        return before(name, *arguments, **named)

    from hvd_ddp.data import fused

    fused._compiled.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with caplog.at_level(logging.WARNING):
        made = loader(STANDARD)
    assert made._preprocess._fused is None and "Numba needs NumPy 1.2 or less" in caplog.text
    assert torch.equal(inputs(made, range(40)), wanted)


@pytest.mark.parametrize(
    ("name", "size", "padding", "flip"),
    [
        ("digits", 8, 1, False),
        ("fashion_mnist", 28, 4, True),
        ("cifar10", 32, 4, True),
        ("mine:factory", 64, 8, True),
    ],
)
def test_standard(name, size, padding, flip):
    part = dataset(4, height=size, width=size)
    data = Data.measure(name, part, part, 10)
    assert choose("standard", data, seed=3) == Augmentation(3, (padding, padding), flip=flip)
    assert choose("none", data, seed=3) is None
    assert TrainConfig.augment == "none"


def test_floating_point_samples_are_refused():
    part = ArrayDataset(np.zeros((9, 4)), np.zeros(9, np.int64))
    data = Data.measure("waves", part, part, 10)
    with pytest.raises(HvdDDPError, match="--augment is `standard`, but the samples of waves are `float64`"):
        check(TrainConfig(augment="standard", global_batch=4), data, 1)
    with pytest.raises(ValueError, match="only uint8"):
        ArrayLoader(part, STANDARD, mean=[0.0] * 4, std=[1.0] * 4, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("change", [{"padding": (-1, 0)}, {"padding": (0, -1)}, {"cutout": -1}], ids=str)
def test_negative_numbers_are_refused(change):
    with pytest.raises(ValueError, match="below 0"):
        Augmentation(0, **change)
