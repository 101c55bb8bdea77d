import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from launchers import ROOT, environment

from hvd_ddp.data import datasets, folder, packed
from hvd_ddp.data.datasets import load, pack, prepare, stage
from hvd_ddp.data.folder import CannotWriteError, only_one
from hvd_ddp.data.packed import DamagedPackError, path_of
from hvd_ddp.errors import HvdDDPError

NAME = "synthetic:2x6x5:4:300"
FILES = ["eval_images.npy", "eval_targets.npy", "manifest.json", "train_images.npy", "train_targets.npy"]


@pytest.fixture
def path(tmp_path):
    """A packed folder."""
    prepare(NAME, tmp_path)
    return path_of(NAME, tmp_path)


def same(first, second):
    assert (first.name, first.num_classes, first.mean, first.std) == (
        second.name, second.num_classes, second.mean, second.std
    )  # fmt: skip
    for one, other in ((first.train, second.train), (first.eval, second.eval)):
        np.testing.assert_array_equal(one.images, other.images)
        np.testing.assert_array_equal(one.targets, other.targets)


def left_over(directory):
    return [name for name in os.listdir(directory) if name.endswith(".tmp")]


def test_what_is_packed_is_what_was_read(path, tmp_path):
    data = load(NAME, tmp_path)
    same(data, load(NAME))
    assert isinstance(data.train.images, np.memmap) and not data.train.images.flags.writeable
    assert sorted(os.listdir(path)) == FILES
    assert prepare(NAME, tmp_path)[1] == "verified"


def test_pack_does_what_prepare_does(path, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    pack(NAME, other)
    for file in FILES:
        assert (path_of(NAME, other) / file).read_bytes() == (path / file).read_bytes()


def test_large_arrays_go_in_pieces(path, tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "PIECE", 1000)
    seen = []
    (tmp_path / "small").mkdir()
    prepare(NAME, tmp_path / "small", lambda *step: seen.append(step))
    assert (path_of(NAME, tmp_path / "small") / "train_images.npy").read_bytes() == (
        path / "train_images.npy"
    ).read_bytes()
    total = (300 + 30) * (60 + 8)
    packing = [done for what, done, of in seen if what == "packing" and of == total]
    assert packing == sorted(packing) and packing[-1] == total and len(packing) > 18


def spoil_json(change):
    def spoil(path):
        manifest = json.loads((path / "manifest.json").read_text())
        change(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))

    return spoil


def cut(name):
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - 1)


def swap(path):
    for first, second in (("train_images", "eval_images"), ("train_targets", "eval_targets")):
        (path / f"{first}.npy").rename(path / "x")
        (path / f"{second}.npy").rename(path / f"{first}.npy")
        (path / "x").rename(path / f"{second}.npy")


def flip(name, position):
    def spoil(path):
        with (path / name).open("r+b") as file:
            file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 0xFF]))

    return spoil


SPOILT = {  # what is done, what the cheap checks at load say
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "has no `manifest.json`"),
    "no json": (lambda path: (path / "manifest.json").write_text("{"), "`manifest.json` that is none"),
    "a list": (lambda path: (path / "manifest.json").write_text("[]"), "`manifest.json` that is none"),
    "no arrays": (spoil_json(lambda m: m.pop("arrays")), "`manifest.json` that is none"),
    "an array too few": (spoil_json(lambda m: m["arrays"].pop("eval_images")), "`manifest.json` that is none"),
    "arrays of nothing": (spoil_json(lambda m: m["arrays"].update(eval_images=None)), "`manifest.json` that is none"),
    "another format": (spoil_json(lambda m: m.update(format=2)), "has the format `2`, this version reads `1`"),
    "another name": (spoil_json(lambda m: m.update(name="cifar10")), f"holds `cifar10`, not `{NAME}`"),
    "no classes": (spoil_json(lambda m: m.pop("num_classes")), "does not fit together"),
    "too few classes": (spoil_json(lambda m: m.update(num_classes=3)), "targets are 0..3, not within 0..2"),
    "a mean too few": (spoil_json(lambda m: m["mean"].pop()), "mean and std do not fit"),
    "std of nothing": (spoil_json(lambda m: m.update(std=[0, 1])), "mean and std do not fit"),
    "std of words": (spoil_json(lambda m: m.update(std="ab")), "does not fit together"),
    "another shape": (spoil_json(lambda m: m["arrays"]["train_images"].update(shape=[300, 60])), "train_images.npy"),
    "no file": (lambda path: (path / "eval_targets.npy").unlink(), "`eval_targets.npy` that can't be read"),
    "cut short": (cut("train_images.npy"), "has `18127` bytes in `train_images.npy`, not `18128`"),
    "empty": (lambda path: os.truncate(path / "train_targets.npy", 0), "has `0` bytes in `train_targets.npy`"),
    "swapped": (swap, "bytes in `train_images.npy`"),
    "no array": (flip("train_images.npy", 0), "`train_images.npy` that can't be read"),
    "a label": (flip("eval_targets.npy", -1), "does not fit together"),
    "a pixel": (flip("eval_images.npy", -7), None),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_pack_is_refused_and_prepare_mends_it(how, path, tmp_path):
    spoil, said = SPOILT[how]
    before = load(NAME, tmp_path / "nowhere")
    spoil(path)
    if said is not None:
        with pytest.raises(DamagedPackError) as caught:
            load(NAME, tmp_path)
        text = str(caught.value)
        assert said in text and f"`{path}`" in text and "data prepare" in text and "\n" not in text
    with pytest.raises(DamagedPackError):
        packed.load(path, NAME)
        packed.verify(path)
    data, done = prepare(NAME, tmp_path)
    assert done.startswith("packed and verified (the old one ")
    same(data, before)
    assert prepare(NAME, tmp_path)[1] == "verified" and not left_over(tmp_path)


def test_swapped_files_of_one_shape_are_found_by_their_hash(tmp_path):
    data = load("synthetic:1x4x4:3:10")
    twin = datasets.Data.measure("twin", data.train, data.train, 3)
    with only_one(tmp_path / "twin.packed"):
        packed.write(twin, tmp_path / "twin.packed", sources={})
    packed.verify(tmp_path / "twin.packed")
    flip("eval_images.npy", -1)(tmp_path / "twin.packed")
    with pytest.raises(DamagedPackError, match=r"`eval_images\.npy` with the SHA-256"):
        packed.verify(tmp_path / "twin.packed")


# ---- nothing half-written


KILLED = f"""
import os, signal, sys
from pathlib import Path
from hvd_ddp.data import datasets, packed
packed.PIECE = 1000
def progress(what, done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)
datasets.prepare("{NAME}", Path(sys.argv[1]), progress)
"""


def python(code, *arguments, **options):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], env=environment(), **options)


def test_a_kill_leaves_nothing_that_counts_and_the_next_one_sweeps(tmp_path):
    assert python(KILLED, tmp_path).wait(60) == -signal.SIGKILL
    assert len(left_over(tmp_path)) == 1 and not path_of(NAME, tmp_path).exists()
    same(load(NAME, tmp_path), load(NAME))  # not from what is left
    name = path_of(NAME, tmp_path).name
    of_others = [tmp_path / f".{name}.elsewhere.1.{word}.tmp" for word in ("0" * 8, "1" * 8)]
    for other in of_others:
        other.mkdir()
    os.utime(of_others[1], (time.time() - 2 * folder.FORGOTTEN,) * 2)
    prepare(NAME, tmp_path)
    assert left_over(tmp_path) == [of_others[0].name]  # of another host, and young: perhaps it still works


def test_the_old_one_stays_when_the_new_one_fails(path, tmp_path, monkeypatch):
    before = (path / "train_images.npy").read_bytes()
    with pytest.raises(ZeroDivisionError), only_one(path), folder.new_folder(path) as new:
        (new / "half").write_bytes(b"1")
        raise ZeroDivisionError
    assert sorted(os.listdir(path)) == FILES and (path / "train_images.npy").read_bytes() == before
    assert not left_over(tmp_path)


def test_a_full_disk(tiny):
    with pytest.raises(CannotWriteError) as caught:
        prepare("synthetic:3x32x32:10:100", tiny)
    text = str(caught.value)
    assert f"`{tiny}` has no room for `synthetic-3x32x32-10-100.packed`, which takes `0.3` MB" in text
    assert "No space left" in text and "Free some space" in text
    assert [name for name in os.listdir(tiny) if not name.endswith(".lock")] == []
    prepare(NAME, tiny)


def test_a_limit_on_the_size_of_files(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(CannotWriteError, match=r"has no room"):
            prepare(NAME, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == []


def test_train_goes_on_where_it_may_not_pack(tiny, caplog):
    """What packing saves is memory: without it each rank reads for itself, and the user is told."""
    pack("synthetic:3x32x32:10:100", tiny)
    assert "has no room" in caplog.text and "into its own memory" in caplog.text
    assert len(load("synthetic:3x32x32:10:100", tiny).train) == 100


def test_a_read_only_folder(read_only, tmp_path):
    with pytest.raises(
        CannotWriteError, match=r"Read-only file system.*Choose an existing folder that you may write to"
    ):
        prepare(NAME, read_only)
    stage(NAME, read_only, tmp_path / "stage")  # packed from what is there
    same(datasets.load_staged(NAME, tmp_path / "stage"), load(NAME))


def test_a_read_only_pack_is_used_and_verified(path, tmp_path):
    before = path.stat().st_mtime_ns
    (tmp_path / f".{path.name}.lock").unlink()
    subprocess.run(["chmod", "-R", "a-w", str(tmp_path)], check=True)
    try:
        pack(NAME, tmp_path)
        assert prepare(NAME, tmp_path)[1] == "verified"
        assert path.stat().st_mtime_ns == before and not (tmp_path / f".{path.name}.lock").exists()
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(tmp_path)], check=True)


# ---- several at once


def test_several_at_once_make_it_once(tmp_path):
    command = [
        sys.executable,
        "-m",
        "hvd_ddp",
        "data",
        "prepare",
        "synthetic:3x32x32:10:3000",
        "--data-dir",
        str(tmp_path),
    ]
    processes = [
        subprocess.Popen(
            command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    said = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert sorted("packed and verified" in out for out, _ in said) == [False, False, False, True], said
    assert not left_over(tmp_path)


@pytest.mark.parametrize("loser", ["first", "second"])
def test_without_locks_the_first_that_is_ready_counts(tmp_path, monkeypatch, loser):
    """Two at once on a file system that has no flock: each writes its own folder, and both find a whole one."""
    monkeypatch.setattr(folder.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(37, "No locks available")))
    path = tmp_path / "x.packed"
    with only_one(path), folder.new_folder(path) as mine:
        (mine / "who").write_text("slow")
        if loser == "first":
            with only_one(path), folder.new_folder(path) as other:
                (other / "who").write_text("fast")
    assert (path / "who").read_text() == "slow" and not left_over(tmp_path)


# ---- staging


def test_staging_copies_verifies_and_is_used(path, tmp_path):
    disk = tmp_path / "node" / "local"
    stage(NAME, tmp_path, disk)
    same(datasets.load_staged(NAME, disk), load(NAME))
    for file in FILES:
        assert (path_of(NAME, disk) / file).read_bytes() == (path / file).read_bytes()
    before = path_of(NAME, disk).stat().st_ino
    stage(NAME, tmp_path, disk)
    assert path_of(NAME, disk).stat().st_ino == before  # it was there


def test_a_staged_copy_that_was_changed_is_made_again(path, tmp_path, caplog):
    disk = tmp_path / "local"
    stage(NAME, tmp_path, disk)
    flip("eval_images.npy", -1)(path_of(NAME, disk))
    stage(NAME, tmp_path, disk)
    assert "it is made again" in caplog.text
    packed.verify(path_of(NAME, disk))


def test_staging_finds_a_damaged_origin(path, tmp_path):
    flip("train_images.npy", -1)(path)
    with pytest.raises(DamagedPackError, match=r"whose SHA-256 is not"):
        stage(NAME, tmp_path, tmp_path / "local")
    assert [name for name in os.listdir(tmp_path / "local") if not name.endswith(".lock")] == []


def test_staging_a_full_disk(path, tiny):
    shutil.copytree(path, tiny.parent / "data" / path.name)
    (tiny / "filler").write_bytes(bytes(90_000))
    with pytest.raises(CannotWriteError, match=r"has no room"):
        stage(NAME, tiny.parent / "data", tiny)
    assert [name for name in os.listdir(tiny) if not name.endswith(".lock")] == ["filler"]


def test_staging_what_is_not_packed(tmp_path):
    with pytest.raises(HvdDDPError, match=r"`digits` has no packed form. Leave --stage out"):
        stage("digits", None, tmp_path)


def test_staging_where_nothing_can_be(path, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWriteError, match=r"can't be written"):
        stage(NAME, tmp_path, tmp_path / "file")
    stage(NAME, tmp_path, tmp_path)  # its own folder: nothing to do
    assert prepare(NAME, tmp_path)[1] == "verified"
