"""Trees of pictures: what is found in them, what each looks like, and what is said of broken ones."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launchers import train
from pictures import picture, tree
from PIL import Image
from test_bad_input import refused
from torchvision.transforms import v2

from hvd_ddp.data.datasets import load
from hvd_ddp.data.image_folder import UnreadableError, middle_box, random_box
from hvd_ddp.errors import HvdDDPError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tree(tmp_path_factory.mktemp("pictures"))


def paths(part):
    return [str(part.path(index).relative_to(part._root)) for index in range(len(part))]


def test_what_is_found(folder, tmp_path):
    data = load("image_folder:32", folder)
    assert (data.num_classes, data.image_shape, data.train.dtype) == (3, (3, 32, 32), np.uint8)
    assert paths(data.train) == [f"c{label}/{index:04d}.jpg" for label in range(3) for index in range(4)]
    assert paths(data.eval) == [f"c{label}/{index:04d}.jpg" for label in range(3) for index in range(2)]
    assert [data.train.read(index, 0, augment=False)[1] for index in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
    assert load("image_folder", folder).image_shape == (3, 224, 224)


def test_other_endings_deeper_folders_and_odd_names(tmp_path):
    root = tree(tmp_path / "data", classes=2)
    (root / "train/c0/deeper").mkdir()
    shutil.copy(root / "train/c0/0000.jpg", root / "train/c0/deeper/a.JPEG")
    picture(1, 30, 40).save(root / "train/c1/ü \n b.png")
    (root / "train/c1/notes.txt").write_text("not a picture")
    (root / "train/.hidden").mkdir()
    (root / "val/c1/0000.jpg").rename(root / "val/c1/9.jpg")
    shutil.rmtree(root / "val/c0")  # a class that is not evaluated keeps its number
    data = load("image_folder:16", root)
    assert paths(data.train) == [
        *[f"c0/{index:04d}.jpg" for index in range(4)], "c0/deeper/a.JPEG",
        *[f"c1/{index:04d}.jpg" for index in range(4)], "c1/ü \n b.png",
    ]  # fmt: skip
    assert paths(data.eval) == ["c1/0001.jpg", "c1/9.jpg"]
    assert data.eval.read(1, 0, augment=False)[1] == 1 and data.train.read(9, 0, augment=False)[1] == 1


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK", "1", "I;16"])
def test_any_kind_of_picture_comes_as_three_colours(mode, tmp_path):
    root = tree(tmp_path / "data", classes=1, train=1, val=1)
    path = root / "train/c0/a.tif"
    picture(3, 30, 40, mode if mode != "I;16" else "L").convert(mode).save(path)
    data = load("image_folder:24", root)
    pixels, target = data.train.read(1, 0, augment=True)
    assert pixels.shape == (3, 24, 24) and pixels.dtype == np.uint8 and target == 0


@pytest.mark.parametrize("size", [(60, 45), (45, 60), (32, 32), (20, 300), (1, 1)])
def test_evaluation_sees_the_middle(size, tmp_path):
    """Against Pillow's own crop, and against torchvision's resize and crop to 7/8, which round to whole pixels."""
    root = tree(tmp_path / "data", classes=1, train=1, val=1)
    image = picture(5, *size)
    image.save(root / "val/c0/0000.png")
    (root / "val/c0/0001.jpg").unlink(missing_ok=True)
    (root / "val/c0/0000.jpg").unlink()
    pixels, _ = load("image_folder:28", root).eval.read(0, 0, augment=False)
    box = middle_box(*size)
    wanted = np.asarray(image.resize((28, 28), Image.BILINEAR, box)).transpose(2, 0, 1)
    np.testing.assert_array_equal(pixels, wanted)
    if min(size) > 30:
        theirs = np.asarray(v2.Compose([v2.Resize(32), v2.CenterCrop(28)])(image)).transpose(2, 0, 1)
        assert np.abs(pixels.astype(int) - theirs.astype(int)).mean() < 4


def test_large_jpegs_are_decoded_smaller_and_look_the_same(tmp_path):
    root = tree(tmp_path / "data", classes=1, train=1, val=1, size=(640, 480))
    data = load("image_folder:48", root)
    image = Image.open(data.eval.path(0))
    wanted = np.asarray(image.convert("RGB").resize((48, 48), Image.BILINEAR, middle_box(640, 480))).transpose(2, 0, 1)
    pixels, _ = data.eval.read(0, 0, augment=False)
    assert not np.array_equal(pixels, wanted)  # it was drafted
    assert np.abs(pixels.astype(int) - wanted.astype(int)).mean() < 2


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(-(2**63), 2**63 - 1))
def test_random_parts_lie_within(width, height, number):
    (left, top, right, bottom), mirrored = random_box(width, height, number)
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    assert isinstance(mirrored, bool)
    assert random_box(width, height, number) == ((left, top, right, bottom), mirrored)


def test_random_parts_are_spread_as_torchvisions():
    torch.manual_seed(0)
    image = torch.zeros(3, 375, 500)
    theirs = []
    for _ in range(4000):
        top, left, height, width = v2.RandomResizedCrop.make_params(v2.RandomResizedCrop(224), [image]).values()
        theirs.append((left, top, left + width, top + height))
    mine, mirrored = zip(*(random_box(500, 375, number * 7919) for number in range(4000)), strict=True)
    assert 0.46 < np.mean(mirrored) < 0.54

    def figures(boxes):
        left, top, right, bottom = np.array(boxes, float).T
        area, ratio = (right - left) * (bottom - top), np.log((right - left) / (bottom - top))
        return np.array([area.mean() / 187500, area.std() / 187500, ratio.mean(), ratio.std(), left.mean() / 500,
                         top.mean() / 375, left.std() / 500, top.std() / 375])  # fmt: skip

    np.testing.assert_allclose(figures(mine), figures(theirs), atol=0.02)


def test_augmented_pictures_are_the_random_part(folder):
    data = load("image_folder:40", folder)
    image = Image.open(data.train.path(2)).convert("RGB")
    for number in range(12):
        pixels, _ = data.train.read(2, number, augment=True)
        box, mirrored = random_box(*image.size, number)
        wanted = np.asarray(image.resize((40, 40), Image.BILINEAR, box)).transpose(2, 0, 1)
        np.testing.assert_array_equal(pixels, wanted[:, :, ::-1] if mirrored else wanted)


# ---- what is wrong with it


def broken(path, how):
    content = path.read_bytes()
    path.write_bytes(
        {"empty": b"", "truncated": content[: len(content) // 2], "text": b"not a picture", "noise": bytes(5000)}[how]
    )


@pytest.mark.parametrize("how", ["empty", "truncated", "text", "noise"])
@pytest.mark.parametrize("augment", [True, False])
def test_broken_pictures_are_named(how, augment, tmp_path):
    root = tree(tmp_path / "data", classes=1)
    broken(root / "train/c0/0001.jpg", how)
    data = load("image_folder:16", root)
    with pytest.raises(UnreadableError, match=r"0001\.jpg` can't be read as a picture.*--skip-bad"):
        data.train.read(1, 0, augment=augment)
    data.train.read(0, 0, augment=augment)


def test_prepare_finds_all_broken_pictures(tmp_path, cli):
    root = tree(tmp_path / "data")
    result = cli("data", "prepare", "image_folder:16", "--data-dir", str(root))
    assert result.code == 0 and "12 + 6 samples of 3x16x16, 3 classes" in result.out
    for name in ("train/c0/0001.jpg", "val/c2/0000.jpg"):
        broken(root / name, "truncated")
    wanted = ["2 of 18 pictures can't be read", "train/c0/0001.jpg", "val/c2/0000.jpg"]
    refused(cli("data", "prepare", "image_folder:16", "--data-dir", str(root)), *wanted)


def damage(root, how):
    if how == "no folder":
        shutil.rmtree(root)
    elif how == "no val":
        shutil.rmtree(root / "val")
    elif how == "no classes":
        shutil.rmtree(root / "val")
        (root / "val").mkdir()
    elif how == "empty class":
        for path in (root / "train/c1").iterdir():
            path.unlink()
    elif how == "another class":
        (root / "val/c2").rename(root / "val/c22")
    elif how == "swapped":
        (root / "train").rename(root / "x")
        (root / "train").write_text("a file")


BAD = {
    "no folder": "which is no folder",
    "no val": "val` can't be listed (No such file or directory)",
    "no classes": "val` has no folders",
    "empty class": "train/c1` has no picture",
    "another class": "has the class `c22`, which",
    "swapped": "train` can't be listed (Not a directory)",
}


@pytest.mark.parametrize("how", BAD)
def test_trees_that_are_none(how, tmp_path, cli):
    root = tree(tmp_path / "data")
    damage(root, how)
    run_dir = str(tmp_path / "run")
    refused(cli("--data", "image_folder:16", "--data-dir", str(root), "--run-dir", run_dir, "--threads", "1"), BAD[how])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["image_folder:0", "image_folder:9999", "image_folder:x", "image_folder:-3"])
def test_sizes_that_are_none(name):
    with pytest.raises(HvdDDPError, match=r"not of the form image_folder:SIZE"):
        load(name)


def test_a_name_that_is_nearly_one(cli):
    refused(cli("data", "prepare", "image_foldr"), "`image_foldr` is unknown", "Did you mean `image_folder`?")


# ---- training


def options(root, run_dir, *more):
    return ["--data", "image_folder:16", "--data-dir", str(root), "--augment", "standard", "--global-batch", "8",
            "--max-steps", "3", "--log-every", "1", "--run-dir", str(run_dir), *more]  # fmt: skip


@pytest.mark.timeout(200)
def test_two_ranks_train_on_a_folder_and_leave_out_broken_pictures(tmp_path):
    root = tree(tmp_path / "data")
    for name in ("train/c0/0001.jpg", "train/c2/0003.jpg", "val/c1/0000.jpg"):
        broken(root / name, "truncated")
    result = train("--nproc", 2, *options(root, tmp_path / "run", "--workers", "2"), cwd=tmp_path)
    assert result.code != 0 and "Traceback" not in result.text, result.text[-3000:]
    assert "can't be read as a picture" in result.text and "--skip-bad" in result.text
    result = train("--nproc", 2, *options(root, tmp_path / "run", "--workers", "2", "--skip-bad"), cwd=tmp_path)
    assert result.code == 0, result.text[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "train"]
    assert sum(row.get("bad_samples", 0) for row in trained) >= 2 and all(math.isfinite(row["loss"]) for row in trained)
    (evaluated,) = [row for row in rows if row["kind"] == "eval" and row["step"] == 3]
    assert evaluated["num_samples"] == 5
    logs = "".join(path.read_text() for path in (tmp_path / "run/logs").rglob("*.log"))
    assert "left out: `" in logs and "0003.jpg" in logs
