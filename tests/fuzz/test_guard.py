"""That the guard sees what it is there for, and that the artefacts which are spoilt elsewhere are taken whole."""

import contextlib
import io
import json
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuzz import guard, test_checkpoints, test_data, test_messages, test_options, test_run_directory
from fuzz.long import fuzz_for
from hvd_ddp.data import image_folder, packed
from hvd_ddp.data.fashion_mnist import load_fashion_mnist
from hvd_ddp.errors import HvdDDPError


def write_outside(folder: Path) -> None:
    (folder / "x").write_text("x")


def write_through_a_link(folder: Path) -> None:
    (folder / "inside" / "x").symlink_to(folder / "outside")
    (folder / "inside" / "x").write_text("x")


def remove_outside(folder: Path) -> None:
    (folder / "outside").unlink()


def move_out(folder: Path) -> None:
    (folder / "inside" / "x").touch()
    (folder / "inside" / "x").rename(folder / "x")


def unpickle(folder: Path) -> None:
    pickle.load(io.BytesIO(b"cos\ngetcwd\n."))


def begin_a_process(folder: Path) -> None:
    subprocess.run(["true"], check=True)


def raise_something(folder: Path) -> None:
    raise KeyError("x")


def leave(folder: Path) -> None:
    raise SystemExit(1)


def take_memory(folder: Path) -> None:
    bytearray(guard.MEMORY + (8 << 20))


def take_more_than_there_is(folder: Path) -> None:
    bytearray(2 * guard.ROOM)


def say_too_much(folder: Path) -> None:
    raise HvdDDPError("x" * guard.LONGEST)


def wait(folder: Path) -> None:
    os.mkfifo(folder / "inside" / "pipe")
    with contextlib.suppress(Exception):  # as a product might that swallows what it does not know
        (folder / "inside" / "pipe").read_bytes()


FAULTS = [write_outside, write_through_a_link, remove_outside, move_out, unpickle, begin_a_process, raise_something,
          leave, take_memory, take_more_than_there_is, say_too_much, wait]  # fmt: skip


def ready(folder: Path) -> Path:
    (folder / "inside").mkdir()
    (folder / "outside").write_bytes(guard.OUTSIDE)
    return folder


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen(fault: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LIMIT", 0.5)
    with pytest.raises((AssertionError, KeyError, MemoryError, guard.HangError)):
        guard.check(fault, ready(tmp_path))


def test_what_is_allowed(tmp_path: Path) -> None:
    def work(folder: Path) -> None:
        (folder / "inside" / "x").write_text("x")
        (folder / "outside").read_bytes()
        raise HvdDDPError("refused")

    assert guard.check(work, ready(tmp_path)) == "refused"


def whole_options(folder: Path) -> None:
    (folder / "inside" / "x.yaml").write_bytes(test_options.as_yaml(test_options.VALID))
    assert test_options.parse(["--config", "x.yaml"]).ema == 0.9


def whole_run(folder: Path) -> None:
    directory = folder / "inside"
    (directory / "summary.json").write_text(json.dumps(test_run_directory.SUMMARY))
    (directory / "metrics.jsonl").write_bytes(test_run_directory.LINES)
    (directory / "config.yaml").write_bytes(test_options.as_yaml(test_options.TrainConfig().to_dict()))
    test_run_directory.start(directory)
    assert (directory / "logs" / "4").is_dir()


def whole_state(folder: Path) -> None:
    test_checkpoints.store(folder / "inside", test_checkpoints.as_file(test_checkpoints.valid()))
    test_checkpoints.go_on(folder / "inside")
    assert json.loads((folder / "inside" / "summary.json").read_text())["steps"] == 3


def whole_weights(folder: Path) -> None:
    for content in (test_checkpoints.as_file(test_checkpoints.valid()),):
        test_checkpoints.look(test_checkpoints.store(folder / "inside", content))


def whole_pack(folder: Path) -> None:
    path = packed.path_of(test_data.NAME, folder / "inside")
    path.mkdir()
    for name, content in test_data.pack().items():
        (path / name).write_bytes(content)
    assert packed.load(path, test_data.NAME) is not None


def whole_idx(folder: Path) -> None:
    for name, content in test_data.FASHION.items():
        (folder / "inside" / name).write_bytes(content)
    assert len(load_fashion_mnist(folder / "inside").train.targets) == 20  # type: ignore[union-attr]


def whole_pictures(folder: Path) -> None:
    for part in ("train", "val"):
        (folder / "inside" / part / "c").mkdir(parents=True)
        for kind, content in test_data.pictures().items():
            (folder / "inside" / part / "c" / f"{kind}.png").write_bytes(
                content if kind != "GIF" else test_data.pictures()["PNG"]
            )
    data = image_folder._open("image_folder:8", 8, folder / "inside", image_folder._list(folder / "inside"))
    image_folder._verify(data, packed.silent)
    assert len(data.train) == 7  # type: ignore[arg-type]


def whole_survey(folder: Path) -> None:
    found = json.dumps(test_data.SURVEY).encode() + b"\n" + test_data.FILES
    assert len(image_folder._open("image_folder:8", 8, folder, found).train) == 3  # type: ignore[arg-type]


WHOLE = [whole_options, whole_run, whole_state, whole_weights, whole_pack, whole_idx, whole_pictures, whole_survey]


@pytest.mark.parametrize("whole", WHOLE, ids=lambda whole: whole.__name__)
def test_what_is_whole_is_taken(whole: Callable[[Path], None], tmp_path: Path) -> None:
    """Else fuzzing finds nothing because everything is refused at once."""
    assert guard.check(whole, ready(tmp_path)) == ""


def test_a_whole_hello_is_let_in() -> None:
    test_messages.handshake.check_hello(test_messages.HELLO)
    assert rendezvous_facts()[1] == ("127.0.0.1", 1)


def rendezvous_facts() -> Any:
    return test_messages.rendezvous._facts(test_messages.ANSWER, test_messages.LAUNCHES[1])


@pytest.mark.full
@pytest.mark.timeout(0)
def test_for_as_long_as_the_environment_says() -> None:
    """FUZZ_MINUTES, 60 if it says nothing."""
    assert fuzz_for(float(os.environ.get("FUZZ_MINUTES", "60"))) == []
