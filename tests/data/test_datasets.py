import gzip
import hashlib
import io
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvd_ddp.data import digits, pack_digits
from hvd_ddp.data.arrays import ArrayDataset, Data, channel_statistics
from hvd_ddp.data.datasets import DATASETS, load
from hvd_ddp.data.idx import read_idx
from hvd_ddp.errors import HvdDDPError

FASHION = Path("/usr/share/datasets/fashion-mnist")
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(array):
    array = np.asarray(array, dtype=np.uint8)
    return b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def pictures(num, size=4, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (num, size, size), dtype=np.uint8)


def write_fashion(folder, *, compressed=False, **changes):
    """Twelve train and five eval images; `changes` replaces contents by train_images, train_labels, ..."""
    parts = {
        "train_images": idx(pictures(12)),
        "train_labels": idx(np.arange(12) % 10),
        "eval_images": idx(pictures(5, seed=1)),
        "eval_labels": idx(np.arange(5)),
    } | changes
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(NAMES, parts.values(), strict=True):
        if compressed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


def refused(action, *fragments):
    """The error's text, after checking that it is one paragraph with these fragments."""
    with pytest.raises(HvdDDPError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text and "`" in text and text.endswith((".", "?", ")"))
    for fragment in fragments:
        assert fragment in text, text
    return text


# ---- types


def test_array_dataset_refuses_other_arrays():
    images, targets = np.zeros((3, 1, 2, 2), np.uint8), np.zeros(3, np.int64)
    assert len(ArrayDataset(images, targets)) == 3
    for other in (targets[:, None], targets.astype(np.float32)):  # for a task of the user's own
        assert ArrayDataset(images, other).target_shape == other.shape[1:]
    for bad_images, bad_targets in [
        (images.astype(np.int32), targets),
        (images.astype(np.float32)[:, 0, 0, 0], targets),
        (images[:, 0], targets),
        (images[:0], targets[:0]),
        (images, targets[:2]),
        (images, targets.astype(np.int32)),
        (images, targets[:, None][:, :0]),
        (images, targets[None]),
    ]:
        with pytest.raises(ValueError, match="not"):
            ArrayDataset(bad_images, bad_targets)


def test_data_refuses_parts_that_do_not_fit():
    small = ArrayDataset(np.zeros((3, 1, 2, 2), np.uint8), np.arange(3))
    large = ArrayDataset(np.zeros((3, 1, 4, 4), np.uint8), np.arange(3))
    with pytest.raises(ValueError, match="images"):
        Data.measure("x", small, large, 3)
    with pytest.raises(ValueError, match=r"0\.\.2, not within 0\.\.1"):
        Data.measure("x", small, small, 2)
    negative = ArrayDataset(small.images, np.array([0, -1, 1]))
    with pytest.raises(ValueError, match="-1"):
        Data.measure("x", small, negative, 3)


def test_floating_point_samples_of_any_shape_are_not_normalised():
    for shape in ((3, 5), (3, 1, 4, 4), (3, 2, 6)):
        part = ArrayDataset(np.full(shape, 7, np.float32), np.arange(3))
        data = Data.measure("x", part, part, 3)
        assert data.image_shape == shape[1:]
        assert (data.mean, data.std) == ((0.0,) * shape[1], (1.0,) * shape[1])
    pixels = ArrayDataset(np.zeros((3, 1, 4, 4), np.uint8), np.arange(3))
    with pytest.raises(ValueError, match="float32 in train, uint8 in eval"):
        Data.measure("x", ArrayDataset(np.zeros((3, 1, 4, 4), np.float32), np.arange(3)), pixels, 3)


def test_statistics_are_exact_and_per_channel(monkeypatch):
    images = np.random.default_rng(3).integers(0, 256, (50, 3, 7, 5), dtype=np.uint8)
    images[:, 1] = 17
    mean, std = channel_statistics(images)
    np.testing.assert_allclose(mean, images.mean((0, 2, 3)), rtol=1e-14)
    np.testing.assert_allclose(std, [images[:, 0].std(), 1.0, images[:, 2].std()], rtol=1e-14)
    assert mean[1] == 17
    assert channel_statistics(images[::-1]) == (mean, std)
    monkeypatch.setattr("hvd_ddp.data.arrays._PIXELS_AT_ONCE", 100)
    assert channel_statistics(images) == (mean, std)


# ---- names


def test_names():
    assert list(DATASETS) == ["digits", "fashion_mnist", "cifar10", "cifar100"]
    refused(lambda: load("fasion-mnist"), "`fasion-mnist`", "Did you mean `fashion_mnist`?", "`digits`")
    assert "Did you mean" not in refused(lambda: load("zzz"), "`digits`, `fashion_mnist`")


def test_importing_needs_no_torch():
    code = "import sys, hvd_ddp.data.datasets, hvd_ddp.data.sampler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# ---- digits


@pytest.fixture(scope="module")
def source():
    import sklearn

    return Path(sklearn.__file__).parent / "datasets" / "data" / "digits.csv.gz"


def test_digits():
    data = load("digits")
    assert (len(data.train), len(data.eval), data.num_classes) == (1437, 360, 10)
    assert data.image_shape == (1, 8, 8) and data.num_channels == 1
    for part in (data.train, data.eval):
        assert part.images.dtype == np.uint8 and part.targets.dtype == np.int64
        assert (part.images.min(), part.images.max()) == (0, 16)
    assert data.mean == (pytest.approx(data.train.images.mean(), rel=1e-14),)
    assert data.std == (pytest.approx(data.train.images.std(), rel=1e-14),)


def test_digits_split_is_stratified_and_shares_no_picture():
    data = load("digits")
    train, evaluation = (np.bincount(part.targets, minlength=10) for part in (data.train, data.eval))
    assert np.all(np.abs(evaluation - (train + evaluation) * 360 / 1797) < 1)
    seen = [{image.tobytes() for image in part.images} for part in (data.train, data.eval)]
    assert not seen[0] & seen[1]
    assert len(seen[0]) + len(seen[1]) == 1797


def test_digits_are_those_of_scikit_learn(source):
    images, targets = pack_digits.read_source(source)
    data = load("digits")
    shipped = [
        (int(target), image.tobytes())
        for part in (data.train, data.eval)
        for image, target in zip(part.images, part.targets, strict=True)
    ]
    original = [(int(target), image.tobytes()) for image, target in zip(images, targets, strict=True)]
    assert sorted(shipped) == sorted(original)


def test_script_writes_the_shipped_file(source, tmp_path):
    shipped = digits.DIGITS_FILE.read_bytes()
    assert hashlib.sha256(shipped).hexdigest() == digits.DIGITS_SHA256
    done = subprocess.run(
        [sys.executable, "-m", "hvd_ddp.data.pack_digits", str(source), str(tmp_path / "again.npz")],
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert (tmp_path / "again.npz").read_bytes() == shipped


def test_script_does_not_depend_on_the_order_or_packing_of_the_source(source, tmp_path):
    lines = gzip.decompress(source.read_bytes()).decode().split()
    random.Random(0).shuffle(lines)
    text = tmp_path / "optdigits.tes"
    text.write_text("\n".join(lines) + "\n")
    assert pack_digits.pack(text) == digits.DIGITS_FILE.read_bytes()


def test_script_refuses_other_sources(source, tmp_path):
    lines = gzip.decompress(source.read_bytes()).decode().split()
    bad = tmp_path / "bad"
    for content in (lines[1:], ["17" + lines[0][1:], *lines[1:]], [lines[0][:-1] + "10", *lines[1:]]):
        bad.write_text("\n".join(content))
        with pytest.raises(ValueError, match="bad holds"):
            pack_digits.read_source(bad)
    images, targets = pack_digits.read_source(source)
    images[:] = images[0]
    with pytest.raises(ValueError, match="both parts"):
        pack_digits.split(images, targets)


def test_damaged_digits_are_refused(monkeypatch, tmp_path):
    content = bytearray(digits.DIGITS_FILE.read_bytes())
    content[-5000] ^= 1
    copy = tmp_path / "digits.npz"
    copy.write_bytes(content)
    monkeypatch.setattr(digits, "DIGITS_FILE", copy)
    refused(lambda: load("digits"), digits.DIGITS_SHA256, hashlib.sha256(content).hexdigest(), "Install hvd_ddp again")
    copy.unlink()
    refused(lambda: load("digits"), str(copy), "Install hvd_ddp again")


# ---- IDX


@pytest.mark.parametrize("compressed", [False, True])
def test_idx_reads_what_was_written(tmp_path, compressed):
    pack = gzip.compress if compressed else bytes
    path = tmp_path / "file"
    for kind, array in (("images", pictures(7)), ("labels", np.arange(9))):
        path.write_bytes(pack(idx(array)))
        values = read_idx(path, kind)
        assert values.dtype == np.uint8
        np.testing.assert_array_equal(values, array)


GOOD = idx(pictures(7))
HUGE = b"\x00\x00\x08\x03" + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1)
BROKEN = {
    "empty": (b"", "begins with the bytes ``"),
    "short magic": (GOOD[:3], "`000008`"),
    "magic": (b"PK\x03\x04" + GOOD[4:], "`504b0304`"),
    "type": (b"\x00\x00\x0d\x03" + GOOD[4:], "`00000d03`"),
    "labels": (idx(np.arange(9)), "holds labels (`1` dimensions) where images (`3`) belong"),
    "dimensions": (idx(pictures(7)[None]), "holds something else (`4` dimensions)"),
    "header": (GOOD[:11], "ends within its header"),
    "truncated": (GOOD[:-1], "cut short"),
    "no values": (GOOD[:16], "cut short"),
    "trailing": (GOOD + b"\x00", "goes on after the `112` values"),
    "no images": (idx(np.zeros((0, 4, 4))), "`(0, 4, 4)`"),
    "no pixels": (idx(np.zeros((3, 0, 4))), "`(3, 0, 4)`"),
    "huge": (HUGE + bytes(100), "`(4294967295, 4294967295, 4294967295)`"),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_idx_is_refused(tmp_path, name, compressed):
    content, fragment = BROKEN[name]
    path = tmp_path / "images"
    path.write_bytes(gzip.compress(content) if compressed else content)
    refused(lambda: read_idx(path, "images"), f"`{path}`", fragment)


def test_swapped_images_are_named(tmp_path):
    path = tmp_path / "labels"
    path.write_bytes(GOOD)
    refused(lambda: read_idx(path, "labels"), f"`{path}` holds images", "swapped")


def test_no_memory_is_taken_for_a_lying_header(tmp_path):
    """2 GiB announced: refused by the length of the file, before anything that large is asked for."""
    path = tmp_path / "images"
    content = b"\x00\x00\x08\x03" + struct.pack(">3I", 2**15, 2**8, 2**8) + bytes(1000)
    for packed in (content, gzip.compress(content)):
        path.write_bytes(packed)
        refused(lambda: read_idx(path, "images"), "more than a file of its length holds")


def test_every_truncation_of_a_gzip_is_refused(tmp_path):
    packed = gzip.compress(GOOD)
    path = tmp_path / "images.gz"
    for length in range(len(packed)):
        path.write_bytes(packed[:length])
        refused(lambda: read_idx(path, "images"), f"`{path}`")


def test_every_flipped_byte_of_a_gzip_is_refused_or_harmless(tmp_path):
    """A flip in the time stamp or the name of the system changes nothing; every other one is noticed."""
    packed = gzip.compress(GOOD)
    path = tmp_path / "images.gz"
    for position in range(len(packed)):
        path.write_bytes(packed[:position] + bytes([packed[position] ^ 0xFF]) + packed[position + 1 :])
        try:
            values = read_idx(path, "images")
        except HvdDDPError:
            continue
        assert position < 10
        np.testing.assert_array_equal(values, pictures(7))


def test_unreadable_idx(tmp_path):
    refused(lambda: read_idx(tmp_path / "gone", "images"), "can't be read", "gone")
    refused(lambda: read_idx(tmp_path, "images"), "can't be read")


# ---- Fashion-MNIST


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("below", ["", "FashionMNIST/raw", "fashion_mnist", "fashion-mnist"])
def test_fashion_is_found_in_each_layout(tmp_path, below, compressed):
    write_fashion(tmp_path / below, compressed=compressed)
    data = load("fashion_mnist", tmp_path)
    np.testing.assert_array_equal(data.train.images, pictures(12)[:, None])
    np.testing.assert_array_equal(data.eval.images, pictures(5, seed=1)[:, None])
    assert data.train.targets.tolist() == [*range(10), 0, 1] and data.eval.targets.tolist() == [0, 1, 2, 3, 4]


def test_a_whole_folder_wins_over_a_partial_one(tmp_path):
    (tmp_path / NAMES[0]).write_bytes(b"left over")
    write_fashion(tmp_path / "fashion_mnist")
    assert len(load("fashion_mnist", tmp_path).train) == 12


def test_fashion_without_a_folder():
    refused(lambda: load("fashion_mnist"), "--data-dir", "dataset-fashion-mnist")


def test_missing_fashion_files_are_named(tmp_path):
    refused(
        lambda: load("fashion_mnist", tmp_path / "nowhere"),
        *(f"`{name}`" for name in NAMES),
        *(f"`{tmp_path / 'nowhere' / below}`" for below in ("", "FashionMNIST/raw", "fashion_mnist", "fashion-mnist")),
        "dataset-fashion-mnist",
        "share/datasets/fashion-mnist",
    )
    folder = write_fashion(tmp_path / "fashion_mnist")
    (folder / NAMES[3]).unlink()
    text = refused(lambda: load("fashion_mnist", tmp_path), f"`{NAMES[3]}`")
    assert NAMES[0] not in text


def test_fashion_files_that_do_not_fit_are_refused(tmp_path):
    write_fashion(tmp_path, train_labels=idx(np.arange(10)))
    refused(lambda: load("fashion_mnist", tmp_path), "`12` images", "`10` labels", NAMES[0], NAMES[1])
    write_fashion(tmp_path, eval_labels=idx([0, 1, 10, 3, 4]))
    refused(lambda: load("fashion_mnist", tmp_path), "label `10`", NAMES[3])
    write_fashion(tmp_path, eval_images=idx(pictures(5, size=6)))
    refused(lambda: load("fashion_mnist", tmp_path), "`(4, 4)`", "`(6, 6)`")
    write_fashion(tmp_path, train_images=idx(np.arange(12) % 10), train_labels=idx(pictures(12)))
    refused(lambda: load("fashion_mnist", tmp_path), NAMES[0], "holds labels", "swapped")


def test_real_fashion_mnist():
    data = load("fashion_mnist", FASHION)
    assert data.train.images.shape == (60000, 1, 28, 28) and data.eval.images.shape == (10000, 1, 28, 28)
    assert np.bincount(data.train.targets).tolist() == [6000] * 10
    assert np.bincount(data.eval.targets).tolist() == [1000] * 10
    assert data.mean[0] / 255 == pytest.approx(0.2860, abs=1e-4) and data.std[0] / 255 == pytest.approx(
        0.3530, abs=1e-4
    )


def test_npz_needs_no_pickle():
    with np.load(io.BytesIO(digits.DIGITS_FILE.read_bytes()), allow_pickle=False) as arrays:
        shapes = {name: (str(arrays[name].dtype), arrays[name].shape) for name in arrays.files}
    assert shapes == {
        "train_images": ("uint8", (1437, 1, 8, 8)),
        "train_targets": ("int64", (1437,)),
        "eval_images": ("uint8", (360, 1, 8, 8)),
        "eval_targets": ("int64", (360,)),
    }
