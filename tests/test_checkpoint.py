"""Checkpoints: whole or passed over, plain types only, and never the last good one deleted."""

import hashlib
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_ddp import checkpoint, durable
from hvd_ddp.errors import HvdDDPError

STATE = {"model": {"w": torch.arange(6.0)}, "progress": {"step": 1}, "config": {"data": "digits", "init": None}}


def steps(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("step_")) for path in checkpoint.found(folder)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "new", 12, STATE, keep=3)
    assert path.name == "step_00000012.pt"
    assert sorted(os.listdir(path.parent)) == ["step_00000012.pt", "step_00000012.pt.sha256"]
    digest, name = (path.parent / "step_00000012.pt.sha256").read_text().split()
    assert (digest, name) == (hashlib.sha256(path.read_bytes()).hexdigest(), path.name)  # as sha256sum -c reads it
    newest, data, passed_over = checkpoint.newest_whole(path.parent)
    assert (newest, passed_over) == (path, [])
    state = checkpoint.parse(data, "here")
    assert torch.equal(state["model"]["w"], STATE["model"]["w"])
    assert state["config"] == STATE["config"]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 123456789, 20):
        checkpoint.save(tmp_path, step, STATE, keep=2)
    assert steps(tmp_path) == [123456789, 20, 15]  # the one of a later step does not count for step 20
    assert len(os.listdir(tmp_path)) == 6


def test_damaged_later_ones_do_not_push_the_good_one_out(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        checkpoint.save(tmp_path, step, STATE, keep=9)
    for step in (20, 30, 40):
        (tmp_path / f"step_{step:08d}.pt").write_bytes(b"cut")
    checkpoint.save(tmp_path, 15, STATE, keep=3)
    newest, _, passed_over = checkpoint.newest_whole(tmp_path)
    assert newest is not None and newest.name == "step_00000015.pt"
    assert [f"{step:08d}" in reason for step, reason in zip((40, 30, 20), passed_over, strict=True)] == [True] * 3


@settings(max_examples=150, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), change=st.sampled_from(["cut", *range(8)]), of_hash=st.booleans())
def test_any_byte_flipped_or_any_tail_cut(
    tmp_path_factory: pytest.TempPathFactory, where: float, change: str | int, of_hash: bool
) -> None:
    """Of the newest checkpoint: it is passed over and named. Of its hash: the same, or it is used as it was written."""
    folder = tmp_path_factory.mktemp("damaged")
    good = checkpoint.save(folder, 1, STATE, keep=3)
    bad = checkpoint.save(folder, 2, {**STATE, "progress": {"step": 2}}, keep=3)
    whole = bad.read_bytes()
    target = bad.with_name(bad.name + ".sha256") if of_hash else bad
    data = bytearray(target.read_bytes())
    position = int(where * len(data))
    if isinstance(change, int):
        data[position] ^= 1 << change
    else:
        del data[position:]
    target.write_bytes(data)
    newest, content, passed_over = checkpoint.newest_whole(folder)
    if of_hash and position >= 64:  # behind the hash stands the name, which nobody needs
        assert (newest, content) in ((bad, whole), (good, good.read_bytes()))
    else:
        assert newest == good
        assert content == good.read_bytes()
        assert len(passed_over) == 1
        assert str(bad) in passed_over[0]


def test_all_broken_is_nothing_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        path = checkpoint.save(tmp_path, step, STATE, keep=3)
        path.write_bytes(path.read_bytes()[:-1])
    newest, data, passed_over = checkpoint.newest_whole(tmp_path)
    assert (newest, data, len(passed_over)) == (None, b"", 3)


def test_it_has_no_name_before_it_was_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that gives back something else: what was there stays, and nothing is added."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, STATE, keep=2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write = checkpoint._write

    def worn_out(path: Path, state: dict) -> str:
        digest = write(path, state)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        return digest

    monkeypatch.setattr(checkpoint, "_write", worn_out)
    with pytest.raises(OSError, match="read back"):
        checkpoint.save(tmp_path, 3, STATE, keep=2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("call", [1, 2])
def test_whoever_may_not_write_changes_nothing(call: int, tmp_path: Path) -> None:
    """Not at first, and not when another took the directory over in the meantime."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, STATE, keep=2)
    (tmp_path / "step_00000003.pt.99.tmp").write_bytes(b"of the other one")
    before = {path.name for path in tmp_path.iterdir()}
    calls: list[int] = []

    def guard() -> None:
        calls.append(1)
        if len(calls) == call:
            raise HvdDDPError("not yours")

    with pytest.raises(HvdDDPError, match="not yours"):
        checkpoint.save(tmp_path, 3, STATE, keep=1, guard=guard)
    assert len(calls) == call
    assert before - {path.name for path in tmp_path.iterdir()} <= ({"step_00000003.pt.99.tmp"} if call == 2 else set())
    assert steps(tmp_path) == [2, 1]


def test_the_best_ones_are_not_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, step, STATE, keep=1, best=[2, 77])
    assert steps(tmp_path) == [4, 2]
    assert len(os.listdir(tmp_path)) == 4


def test_without_a_hash_it_does_not_count(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, STATE, keep=3)
    for text in (None, "", "zz", "\udcff".encode("utf-8", "surrogatepass")):
        hash_file = path.with_name(path.name + ".sha256")
        if text is None:
            hash_file.unlink()
        else:
            hash_file.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert checkpoint.newest_whole(tmp_path)[0] is None


def test_stale_temporaries_are_cleaned(tmp_path: Path) -> None:
    (tmp_path / "step_00000001.pt.4711.tmp").write_bytes(b"half")
    (tmp_path / "step_00000001.pt.sha256").write_bytes(b"of a file that never came")
    checkpoint.save(tmp_path, 2, STATE, keep=3)
    assert sorted(os.listdir(tmp_path)) == ["step_00000002.pt", "step_00000002.pt.sha256"]


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        durable.replace_file(path, b"new")
    assert os.listdir(tmp_path) == ["summary.json"]
    assert path.read_text() == "old"


class Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("touch /tmp/hvd_ddp_was_here",)


@pytest.mark.parametrize("data", [pickle.dumps(Evil(), 2), b"", b"PK\x03\x04", bytes(1000)])
def test_no_code_comes_out_of_a_file(data: bytes) -> None:
    with pytest.raises(HvdDDPError):
        checkpoint.parse(data, "evil.pt")
    assert not os.path.exists("/tmp/hvd_ddp_was_here")


def test_a_list_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(HvdDDPError, match="holds a list"):
        checkpoint.parse((tmp_path / "list.pt").read_bytes(), "list.pt")
