import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_ddp.data.arrays import ArrayDataset, channel_statistics
from hvd_ddp.data.datasets import load
from hvd_ddp.data.loader import ArrayLoader

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def dataset(num=23, channels=3, height=7, width=5):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (num, channels, height, width), dtype=np.uint8)
    return ArrayDataset(images, random.integers(0, 10, num))


def loader(data=None, dtype=torch.float32, device="cpu"):
    data = data or dataset()
    mean, std = channel_statistics(data.images)
    return ArrayLoader(data, mean=mean, std=std, device=device, dtype=dtype)


@pytest.fixture
def on(request):
    """The device, or a skip where it isn't there."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("on", ["cpu", CUDA], indirect=True)
def test_a_sample_does_not_depend_on_its_batch(dtype, on):
    data = dataset(num=300)
    load = loader(data, dtype, on)
    alone = [load.micro_batches(np.array([index]), 1)[0] for index in range(len(data))]
    for batch in (
        *load.micro_batches(np.arange(len(data)), 1),
        *load.micro_batches(np.arange(len(data)), 7),
        *load.evaluation_batches(rank=0, world_size=1, batch_size=37),
    ):
        first = next(index for index, one in enumerate(alone) if torch.equal(one.inputs[0], batch.inputs[0]))
        for place in range(batch.num_samples):
            assert torch.equal(batch.inputs[place], alone[first + place].inputs[0])
            assert batch.targets[place] == data.targets[first + place]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_are_those_of_the_formula(dtype):
    data = dataset()
    mean, std = channel_statistics(data.images)
    (batch,) = loader(data, dtype).micro_batches(np.array([5, 2, 2]), 1)
    numbers = np.float64 if dtype == torch.float64 else np.float32
    wanted = (data.images[[5, 2, 2]].astype(numbers) - np.array(mean, numbers)[:, None, None]) / np.array(std, numbers)[
        :, None, None
    ]
    assert batch.inputs.dtype == dtype and batch.targets.dtype == torch.int64
    np.testing.assert_array_equal(batch.inputs.numpy(), wanted)
    assert batch.targets.tolist() == data.targets[[5, 2, 2]].tolist() and batch.num_samples == 3


@given(indices=st.lists(st.integers(0, 22), max_size=30), accumulate=st.integers(1, 9))
def test_micro_batches_hold_each_index_once_in_order(indices, accumulate):
    data = dataset()
    load = loader(data)
    batches = load.micro_batches(np.array(indices, dtype=np.int64), accumulate)
    assert len(batches) == accumulate
    counts = [batch.num_samples for batch in batches]
    assert sum(counts) == len(indices) and max(counts) - min(counts) <= 1
    counted = [target for batch in batches for target in batch.targets.tolist()[: batch.num_samples]]
    assert counted == data.targets[indices].tolist()
    for batch in batches:
        assert batch.inputs.shape == (max(batch.num_samples, 1), 3, 7, 5)
        if batch.num_samples == 0:
            assert torch.equal(batch.inputs, load.micro_batches(np.array([0]), 1)[0].inputs)
            assert batch.targets.tolist() == data.targets[:1].tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num", [1, 2, 4, 23])
@pytest.mark.parametrize("batch_size", [1, 3, 256])
def test_evaluation_takes_each_sample_once(world_size, num, batch_size):
    data = dataset(num)
    load = loader(data)
    ranks = [
        list(load.evaluation_batches(rank=rank, world_size=world_size, batch_size=batch_size))
        for rank in range(world_size)
    ]
    batches = [batch for rank in ranks for batch in rank]
    assert all(1 <= batch.num_samples == len(batch.inputs) == len(batch.targets) <= batch_size for batch in batches)
    (whole,) = load.micro_batches(np.arange(num), 1)
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), whole.inputs)
    assert torch.equal(torch.cat([batch.targets for batch in batches]), whole.targets)
    assert [len(rank) == 0 for rank in ranks] == [rank >= num for rank in range(world_size)]


def test_images_are_not_copied_and_read_only_ones_do_not_warn(tmp_path):
    data = dataset()
    np.save(tmp_path / "images.npy", data.images)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    read_only = np.frombuffer(data.images.tobytes(), np.uint8).reshape(data.images.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for images in (data.images, mapped, read_only):
            load = loader(ArrayDataset(images, data.targets))
            assert load._images.data_ptr() == images.ctypes.data
            assert torch.equal(
                load.micro_batches(np.arange(23), 1)[0].inputs, loader(data).micro_batches(np.arange(23), 1)[0].inputs
            )
        indices = np.arange(5)
        indices.flags.writeable = False
        load.micro_batches(indices, 2)


def test_batches_leave_the_data_alone():
    data = dataset()
    before = data.images.copy()
    for batch in (*loader(data).micro_batches(np.arange(5), 2), *loader(data).evaluation_batches(rank=0, world_size=1)):
        batch.inputs.zero_()
    np.testing.assert_array_equal(data.images, before)


def test_arrays_with_any_strides():
    data = dataset()
    reversed_ = ArrayDataset(data.images[::-1, :, ::-1], data.targets[::-1])
    (batch,) = loader(reversed_, torch.float64).micro_batches(np.array([0]), 1)
    (wanted,) = loader(data, torch.float64).micro_batches(np.array([22]), 1)
    assert torch.equal(batch.inputs, wanted.inputs.flip(2)) and torch.equal(batch.targets, wanted.targets)


def test_normalised_digits_have_mean_0_and_std_1():
    data = load("digits")
    load_train = ArrayLoader(data.train, mean=data.mean, std=data.std, device="cpu", dtype=torch.float64)
    inputs = load_train.micro_batches(np.arange(len(data.train)), 1)[0].inputs
    assert inputs.mean().item() == pytest.approx(0, abs=1e-12)
    assert inputs.std(correction=0).item() == pytest.approx(1, abs=1e-12)


def test_bad_arguments_are_refused():
    data = dataset()
    good = {"mean": [0.0] * 3, "std": [1.0] * 3, "device": "cpu", "dtype": torch.float32}
    for change in ({"mean": [0.0]}, {"std": [1.0]}, {"std": [1.0, 0.0, 1.0]}, {"dtype": torch.int64}):
        with pytest.raises(ValueError, match=next(iter(change))):
            ArrayLoader(data, **good | change)
    load = ArrayLoader(data, **good)
    with pytest.raises(ValueError, match="accumulate"):
        load.micro_batches(np.arange(3), 0)
    for index in (-1, 23):
        with pytest.raises(IndexError, match="indices"):
            load.micro_batches(np.array([3, index]), 1)
    with pytest.raises(ValueError, match="batch_size"):
        load.evaluation_batches(rank=0, world_size=1, batch_size=0)
    with pytest.raises(ValueError, match="rank"):
        load.evaluation_batches(rank=2, world_size=2)


@pytest.mark.parametrize("kind", [np.float32, np.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (3, 4, 4)], ids=str)
def test_floating_point_samples_come_as_they_are(shape, kind):
    values = np.random.default_rng(0).standard_normal((9, *shape)).astype(kind)
    values.flags.writeable = False
    data = ArrayDataset(values, np.arange(9))
    load = ArrayLoader(data, mean=[0.0] * shape[0], std=[1.0] * shape[0], device="cpu", dtype=torch.float32)
    wanted = torch.tensor(values.astype(np.float32))
    (batch,) = load.micro_batches(np.array([4, 4, 8]), 1)
    assert torch.equal(batch.inputs, wanted[[4, 4, 8]])
    (batch,) = load.evaluation_batches(rank=0, world_size=1)
    assert torch.equal(batch.inputs, wanted)
    batch.inputs.zero_()  # a model may work in place
    assert torch.equal(next(load.evaluation_batches(rank=0, world_size=1)).inputs, wanted)
