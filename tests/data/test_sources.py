"""Where data comes from: CIFAR's files, synthetic images, the user's own; and the command that prepares it."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import cifar_files
import numpy as np
import pytest
from launchers import BIN, run, train
from test_bad_input import refused

from hvd_ddp.data import own, packed, source
from hvd_ddp.data.datasets import load, pack, prepare
from hvd_ddp.data.synthetic import synthetic
from hvd_ddp.errors import HvdDDPError

HERE = Path(__file__).parent
FASHION = "/usr/share/datasets/fashion-mnist"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Nothing is asked for by accident."""

    def refuse(url, root, filename, md5):
        raise OSError(f"asked for {url}")

    monkeypatch.setattr("torchvision.datasets.utils.download_url", refuse)


# ---- CIFAR


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read_packed_and_mapped(name, tmp_path, monkeypatch):
    parts = cifar_files.write(monkeypatch, tmp_path, name)
    for data in (load(name, tmp_path), prepare(name, tmp_path)[0], load(name, tmp_path)):
        for part, (images, targets) in zip((data.train, data.eval), parts, strict=True):
            np.testing.assert_array_equal(part.images, images)
            assert part.targets.tolist() == targets
        assert data.num_classes == int(name.removeprefix("cifar")) and data.image_shape == (3, 32, 32)
    assert isinstance(data.train.images, np.memmap)
    shutil.rmtree(next(path for path in tmp_path.iterdir() if path.suffix != ".packed" and path.is_dir()))
    assert isinstance(load(name, tmp_path).train.images, np.memmap)  # the pack is enough


def test_cifar_packed_again_when_its_files_change(tmp_path, monkeypatch):
    cifar_files.write(monkeypatch, tmp_path / "a")
    assert prepare("cifar10", tmp_path / "a")[1] == "packed and verified (it was not there)"
    batch = tmp_path / "a/cifar-10-batches-py/data_batch_1"
    os.utime(batch, (1, 1))
    assert not isinstance(load("cifar10", tmp_path / "a").train.images, np.memmap)
    assert prepare("cifar10", tmp_path / "a")[1] == "packed and verified (its files had changed)"
    os.utime(batch, (2, 2))
    pack("cifar10", tmp_path / "a")
    assert isinstance(load("cifar10", tmp_path / "a").train.images, np.memmap)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
@pytest.mark.parametrize("how", ["evil", "truncated", "swapped", "missing"])
def test_nothing_is_unpickled_that_has_not_the_published_checksum(file, how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cifar_files.write(monkeypatch, tmp_path / "data")
    path = tmp_path / "data/cifar-10-batches-py" / file
    if how == "evil":
        path.write_bytes(pickle.dumps(Evil()))
    elif how == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "swapped":
        shutil.copy(path.with_name("data_batch_1"), path)
    else:
        path.unlink()
    monkeypatch.setattr(pickle, "load", lambda *_, **__: pytest.fail("unpickled"))
    with pytest.raises(
        HvdDDPError, match=r"lacks" if how == "missing" else "published MD5 `.*is not unpickled"
    ) as caught:
        load("cifar10", tmp_path / "data")
    assert f"`{path}`" in str(caught.value) or f"`{path.relative_to(tmp_path)}`" in str(caught.value)
    with pytest.raises(HvdDDPError):
        prepare("cifar10", tmp_path / "data")
    pack_left = [name for name in os.listdir(tmp_path / "data") if not name.endswith(".lock")]
    assert pack_left == ["cifar-10-batches-py"] and not (tmp_path / "unpickled").exists()


def test_the_archive_alone_is_enough_without_a_network(tmp_path, monkeypatch):
    cifar_files.write(monkeypatch, tmp_path, archive=True)
    with pytest.raises(HvdDDPError, match=r"lacks .*data prepare cifar10"):
        load("cifar10", tmp_path)
    assert prepare("cifar10", tmp_path)[1].startswith("packed and verified")
    assert len(load("cifar10", tmp_path).train) == 100


def test_a_damaged_archive_is_not_unpacked(tmp_path, monkeypatch):
    cifar_files.write(monkeypatch, tmp_path, archive=True)
    os.truncate(tmp_path / "cifar-10-python.tar.gz", 1000)
    with pytest.raises(HvdDDPError, match=r"cifar-10-python\.tar\.gz` does not have the published MD5 .*not unpacked"):
        prepare("cifar10", tmp_path)
    assert not (tmp_path / "cifar-10-batches-py").exists()


def test_without_a_network_the_file_to_bring_is_named(tmp_path):
    with pytest.raises(HvdDDPError, match=r"kriz/cifar-10-python\.tar\.gz` can't be downloaded.*put it there as"):
        prepare("cifar10", tmp_path)
    with pytest.raises(HvdDDPError, match=r"zalandoresearch|fashion-mnist"):
        prepare("fashion_mnist", tmp_path)
    with pytest.raises(HvdDDPError, match=r"--data-dir DIR"):
        load("cifar10")


def test_a_download_counts_when_it_has_its_checksum(tmp_path, monkeypatch):
    cifar_files.write(monkeypatch, tmp_path / "server", archive=True)
    archive = tmp_path / "server/cifar-10-python.tar.gz"
    content = archive.read_bytes()

    def download(url, root, filename, md5):
        (Path(root) / filename).write_bytes(content)
        if hashlib.md5(content).hexdigest() != md5:
            raise RuntimeError("File not found or corrupted.")

    monkeypatch.setattr("torchvision.datasets.utils.download_url", download)
    (tmp_path / "data").mkdir()
    prepare("cifar10", tmp_path / "data")
    assert sorted(path.name for path in (tmp_path / "data").iterdir() if not path.name.startswith(".")) == [
        "cifar-10-batches-py", "cifar-10-python.tar.gz", "cifar10.packed",
    ]  # fmt: skip
    content = content[:-1]
    with pytest.raises(HvdDDPError, match=r"corrupted"):
        source.fetch("https://x", tmp_path / "file", "00")
    assert not [path for path in tmp_path.iterdir() if "file" in path.name]


# ---- Fashion-MNIST


def test_fashion_is_mapped_only_where_it_was_prepared(tmp_path):
    for file in Path(FASHION).iterdir():
        (tmp_path / file.name).symlink_to(file)
    pack("fashion_mnist", tmp_path)  # by train
    assert not isinstance(load("fashion_mnist", tmp_path).train.images, np.memmap)
    data, done = prepare("fashion_mnist", tmp_path)
    assert done.startswith("packed") and data.mean == load("fashion_mnist", Path(FASHION)).mean
    assert isinstance(load("fashion_mnist", tmp_path).train.images, np.memmap)


# ---- synthetic


def test_synthetic_images_are_the_same_everywhere():
    data = load("synthetic:1x4x5:3:50")
    assert (data.train.images.shape, data.eval.images.shape, data.num_classes) == ((50, 1, 4, 5), (5, 1, 4, 5), 3)
    assert hashlib.sha256(data.train.images.tobytes()).hexdigest()[:16] == "93cd326ddf5d02cf"
    assert data.train.targets.tolist()[:5] == [0, 1, 2, 0, 1]
    seen = {image.tobytes() for part in (data.train, data.eval) for image in part.images}
    assert len(seen) == 55
    assert load("synthetic").train.images.shape == (10000, 3, 32, 32)


def test_more_synthetic_images_begin_with_the_fewer(monkeypatch):
    few = load("synthetic:1x4x5:3:50").train
    monkeypatch.setattr("hvd_ddp.data.synthetic.PIECE", 10**9)
    np.testing.assert_array_equal(load("synthetic:1x4x5:3:50").train.images, few.images)


@pytest.mark.parametrize("name", ["synthetic:3x32:10:5", "synthetic:3x32x32:10", "synthetic:0x1x1:1:1", "synthetic:x"])
def test_synthetic_of_no_form(name):
    with pytest.raises(HvdDDPError, match=r"not of the form synthetic:CxHxW:CLASSES:SIZE"):
        synthetic(name)


def test_synthetic_beyond_reason():
    with pytest.raises(HvdDDPError, match=r"over 64 GiB"):
        synthetic("synthetic:3x1024x1024:10:99999999")


# ---- the user's own


@pytest.fixture
def here(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


GOOD = {
    "tensors": ((5,), 3, np.float32),
    "items": ((5,), 3, np.float32),
    "tokens": ((5,), 3, np.int64),
    "images": ((3, 4, 5), 7, np.uint8),
    "grey": ((1, 4, 5), 3, np.uint8),
    "pictures": ((3, 4, 5), 3, np.uint8),
    "grey_pictures": ((1, 4, 5), 3, np.uint8),
    "arrays": ((1, 4, 5), 12, np.uint8),
    "mapped": ((1, 4, 5), 12, np.uint8),
}


@pytest.mark.parametrize("factory", GOOD)
def test_own_data(factory, tmp_path, here):
    shape, num_classes, dtype = GOOD[factory]
    data = load(f"own_data:{factory}", tmp_path)
    assert (data.image_shape, data.num_classes, len(data.train)) == (shape, num_classes, 12)
    assert data.train.dtype == dtype
    if factory == "pictures":
        wanted = np.arange(12 * 4 * 5 * 3).reshape(12, 4, 5, 3).astype(np.uint8).transpose(0, 3, 1, 2)
        np.testing.assert_array_equal([data.train.read(index, 0)[0] for index in range(12)], wanted)
        assert data.mean == pytest.approx(wanted.mean((0, 2, 3))) and data.std == pytest.approx(wanted.std((0, 2, 3)))


def test_own_classes_are_counted_or_told(here, caplog):
    assert load("own_data:with_classes").num_classes == 4 and not caplog.text
    assert load("own_data:items").num_classes == 3 and "Reading all 12 samples" in caplog.text


def test_own_tensors_are_not_copied(here):
    import own_data

    tensors = own_data.tensors(None)[0]
    assert own._part("x", tensors).images.ctypes.data == tensors.tensors[0].data_ptr()


BAD = {
    "takes_nothing": "can't be called as factory(data_dir)",
    "none": "returned a `NoneType`",
    "single": "returned a `TensorDataset`",
    "four": "returned a `tuple of 4`",
    "stream_alone": "has an iterable data set, whose classes nobody can count",
    "empty_stream": "is empty",
    "empty": "is empty",
    "no_data_sets": "train` is a `int`",
    "regression": "targets of the type float32 and the shape `()` a sample, and classification wants one class",
    "one_hot": "targets of the type int64 and the shape `(12,)` a sample",
    "one_hot_items": "targets of the type float32 and the shape `(4,)` a sample",
    "ragged_targets": "int64 `()` as the target of its first sample and int64 `(1,)` as the target of its sample 1",
    "targets_differ": "the target of a sample is int64 () in train, float32 () in eval",
    "flat_pixels": "inputs of the type uint8 and the shape `(5,)` a sample",
    "ragged": "float32 `(3,)` as its first sample and float32 `(4,)` as its sample 1",
    "three_things": "a `tuple of 3` as its sample 0",
    "words": "holds a `str`, which is no numbers",
    "label": "targets are 0..4, not within 0..3",
    "negative": "targets are -1..1",
    "parts_differ": "(5,) in train, (4,) in eval",
    "no_classes": "returned `'ten'` as num_classes",
    "lengths": "targets are int64 (11,)",
    "nothing_of_that_name": "can't be loaded",
}


@pytest.mark.parametrize("factory", BAD)
def test_own_data_that_does_not_fit(factory, cli, tmp_path, here):
    run_dir = tmp_path / "none"
    refused(
        cli("--data", f"own_data:{factory}", "--max-steps", "1", "--threads", "1", "--run-dir", str(run_dir)),
        BAD[factory],
        "own_data",
    )
    assert not run_dir.exists()


@pytest.mark.timeout(200)
def test_own_floats_train_on_two_ranks(tmp_path):
    (tmp_path / "models.py").write_text(
        "from torch import nn\ndef line(num_classes): return nn.Linear(2, num_classes)\n"
    )
    shutil.copy(HERE / "own_data.py", tmp_path)
    options = [
        "--data",
        "own_data:separable",
        "--model",
        "models:line",
        "--lr",
        "0.1",
        "--epochs",
        "8",
        "--run-dir",
        "r",
    ]
    result = train("torchrun", 2, *options, cwd=tmp_path)
    assert result.code == 0, result.text[-3000:]
    assert json.loads((tmp_path / "r/summary.json").read_text())["accuracy"] > 0.9


# ---- the command


def test_list_shows_all(cli, tmp_path):
    prepare("synthetic:1x4x4:3:10", tmp_path)
    result = cli("data", "list", "--data-dir", str(tmp_path))
    assert result.code == 0
    for word in (
        "digits",
        "fashion_mnist",
        "cifar10",
        "cifar100",
        "synthetic:CxHxW",
        "module:factory",
        "1x4x4:3:10, packed",
    ):
        assert word in result.out


def test_prepare_says_what_it_did(cli, tmp_path, here):
    result = cli("data", "prepare", "synthetic:1x4x4:3:10", "--data-dir", str(tmp_path))
    assert (result.code, result.err) == (0, "")
    assert "10 + 1 samples of 1x4x4, 3 classes" in result.out and str(tmp_path) in result.out
    assert "read and checked" in cli("data", "prepare", "digits").out
    assert "12 + 12 samples of 3x4x5" in cli("data", "prepare", "own_data:pictures").out


def test_a_progress_bar_on_a_terminal(tmp_path):
    command = f"{BIN}/python -m hvd_ddp data prepare synthetic:3x32x32:10:20000 --data-dir {tmp_path}"
    result = run(["script", "-qec", command, "/dev/null"], cwd=tmp_path)
    assert result.code == 0 and "packing" in result.out and "verifying" in result.out


PREPARE = {
    "unknown": (["cifar11"], ["`cifar11` is unknown", "Did you mean `cifar10`?"]),
    "no folder": (["cifar10"], ["--data-dir is `None`", "existing folder"]),
    "a folder that is not there": (["cifar10", "--data-dir", "nowhere"], ["`nowhere`, which is no folder"]),
    "a file for a folder": (["cifar10", "--data-dir", str(HERE / "own_data.py")], ["which is no folder"]),
    "no form": (["synthetic:3", "--data-dir", "."], ["not of the form"]),
    "no network": (["cifar100", "--data-dir", "."], ["cifar-100-python.tar.gz` can't be downloaded"]),
    "own": (["own_data:none"], ["returned a `NoneType`"]),
}


@pytest.mark.parametrize("case", PREPARE)
def test_prepare_refuses(case, cli, here):
    arguments, wanted = PREPARE[case]
    refused(cli("data", "prepare", *arguments), *wanted)


def test_prepare_on_a_full_disk(cli, tiny):
    refused(cli("data", "prepare", "synthetic:3x32x32:10:100", "--data-dir", str(tiny)), "has no room", "Free some")


def test_train_refuses_a_damaged_pack(cli, tmp_path):
    name = "synthetic:1x4x4:3:100"
    prepare(name, tmp_path)
    at = ["--data", name, "--data-dir", str(tmp_path), "--max-steps", "1", "--threads", "1", "--run-dir", "r"]
    os.truncate(packed.path_of(name, tmp_path) / "train_images.npy", 100)
    refused(cli(*at), "has `100` bytes in `train_images.npy`", "data prepare")
    assert cli("data", "prepare", name, "--data-dir", str(tmp_path)).code == 0
    assert cli(*at).code == 0


@pytest.mark.timeout(200)
def test_two_ranks_pack_once_and_stage(tmp_path):
    options = ["--data", "synthetic:3x8x8:4:200", "--data-dir", "data", "--stage", "local", "--max-steps", "2"]
    (tmp_path / "data").mkdir()
    result = train("--nproc", 2, *options, "--run-dir", "r", cwd=tmp_path)
    assert result.code == 0, result.text[-3000:]
    for folder in ("data", "local"):
        assert [path.name for path in (tmp_path / folder).glob("[!.]*")] == ["synthetic-3x8x8-4-200.packed"]
        packed.verify(tmp_path / folder / "synthetic-3x8x8-4-200.packed")
    result = run([str(BIN / "python"), "-m", "hvd_ddp", "evaluate", "r"], cwd=tmp_path)
    assert result.code == 0 and "accuracy" in result.out, result.text[-2000:]
