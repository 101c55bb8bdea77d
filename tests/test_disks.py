"""A full disk, a read-only one, a directory that is not the one it was: training neither dies nor lies."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import factories
import pytest
import torch
from disks import disk, read_only
from launchers import ROOT, Result, run
from rundir import different, last_step, newest, rows, summary, tensors

Cli = Callable[..., Result]
STEPS = 20
OPTIONS = ["--model", "factories:Disturbed", "--threads", "1", "--max-steps", str(STEPS), "--save-every", "2",
           "--log-every", "1", "--optimizer", "adamw"]  # fmt: skip


@pytest.fixture
def train(cli: Cli) -> Cli:
    return lambda *options: cli(*OPTIONS, *options)


@pytest.fixture
def at() -> Iterator[dict[int, Callable[[], object]]]:
    """What happens before the nth step of the next start."""
    yield factories.Disturbed.at
    factories.Disturbed.at.clear()


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The end of the run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("wanted")
    result = run([sys.executable, "-m", "hvd_ddp", *OPTIONS, "--run-dir", str(folder)], cwd=ROOT / "tests")
    assert result.code == 0, result.text
    return tensors(newest(folder))


@pytest.fixture
def full_soon(tmp_path: Path) -> Iterator[Path]:
    """A run directory on a file system of 20 MB, in which five checkpoints find room."""
    with disk(tmp_path / "run", "size=20m") as folder:
        yield folder


def steps(folder: Path) -> list[int]:
    """Of checkpoints that fit their hash; all do."""
    found = sorted((folder / "checkpoints").glob("step_*.pt"))
    loaded = [torch.load(path, weights_only=True)["progress"]["step"] for path in found]
    assert [f"step_{step:08d}.pt" for step in loaded] == [path.name for path in found]
    return loaded


def all_there(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    """The run has ended well; each step stands in metrics.jsonl, nothing half stands anywhere."""
    assert summary(folder)["status"] == "finished"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [*range(1, STEPS + 1)]
    assert different(tensors(newest(folder)), wanted) == []
    assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]
    assert not (folder / "lock.json").exists()


def test_checkpoints_fill_the_disk(train: Cli, full_soon: Path, wanted: dict[str, torch.Tensor]) -> None:
    """It trains to its end, says that this is not saved, and goes on from what is once there is room."""
    result = train("--keep", "99", "--run-dir", str(full_soon))
    assert result.code == 2, result.text
    saved = steps(full_soon)
    assert saved == [2, 4, 6, 8, 10][: len(saved)]
    assert len(saved) >= 3
    assert [row["step"] for row in rows(full_soon, "save")] == saved
    assert f"the checkpoint of step {saved[-1] + 2} can't be written: No space left" in result.out
    assert [row["step"] for row in rows(full_soon, "warning")] == [*range(saved[-1] + 2, STEPS + 1, 2)]
    assert last_step(full_soon) == STEPS
    assert f"Step {STEPS} can't be saved in `{full_soon}/checkpoints`: No space left on device" in result.err
    assert f"the newest checkpoint is `step_{saved[-1]:08d}.pt`" in result.err
    assert "Traceback" not in result.text
    assert (summary(full_soon)["status"], summary(full_soon)["steps"]) == ("failed", STEPS)
    assert rows(full_soon, "end") == []
    again = train("--keep", "1", "--run-dir", str(full_soon))  # makes the room
    assert again.code == 0, again.text
    assert [row["step"] for row in rows(full_soon, "resume")] == [saved[-1]]
    assert different(tensors(newest(full_soon)), wanted) == []
    assert STEPS in steps(full_soon)


def test_another_fills_the_disk_to_the_last_byte_and_goes(
    train: Cli, at: dict, full_soon: Path, wanted: dict[str, torch.Tensor]
) -> None:
    """Even lines of metrics find no room; later they are all there."""
    hog, metrics = full_soon / "hog", full_soon / "metrics.jsonl"

    def fill_all() -> None:
        left = -metrics.stat().st_size % 4096  # in the last page of the file there would still be room
        with metrics.open("a") as file:
            file.write(f'{{"kind": "{"x" * (left - 20)}"}}\n')
        fill(hog)

    at[6], at[13] = once_saved(4, full_soon, fill_all), hog.unlink
    result = train("--keep", "1", "--run-dir", str(full_soon))
    assert result.code == 0, result.text
    assert result.out.count("metrics.jsonl can't be written: No space left on device. Its lines wait in memory") == 1
    assert "the checkpoint of step 6 can't be written: No space left on device" in result.out
    all_there(full_soon, wanted)


def test_a_disk_that_stays_full_to_the_last_byte(train: Cli, at: dict, full_soon: Path) -> None:
    """Its own blocks are left to summary.json: it does not say that the run is running."""
    at[6] = once_saved(4, full_soon, lambda: fill(full_soon / "hog"))
    result = train("--keep", "1", "--run-dir", str(full_soon))
    assert result.code == 2, result.text
    assert f"Step {STEPS} can't be saved" in result.err
    assert summary(full_soon)["status"] == "failed"
    assert steps(full_soon)[-1] == 4
    assert all(json.loads(line) for line in (full_soon / "metrics.jsonl").read_text().splitlines())


def test_told_to_stop_on_a_full_disk(train: Cli, at: dict, full_soon: Path) -> None:
    """It would go on from where it was before, and fill the time of the queue: that is for a person to mend."""
    at[6] = once_saved(4, full_soon, lambda: fill(full_soon / "hog"))
    at[9] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    result = train("--max-steps", "9999", "--run-dir", str(full_soon))
    assert result.code == 2, result.text
    assert "told to stop (signal SIGTERM)" in result.out
    assert "to go on" not in result.out
    assert re.search(r"Step \d+ can't be saved .* the newest checkpoint is `step_00000004.pt`", result.err)
    assert summary(full_soon)["status"] == "failed"


def test_all_ranks_mean_the_same_of_a_full_disk(tmp_path: Path) -> None:
    with disk(tmp_path / "run", "size=20m") as folder:
        program = ["-m", "hvd_ddp", "train", *OPTIONS, "--keep", "99", "--run-dir", str(folder), "--nproc", "2"]
        result = run([sys.executable, *program], PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
        assert result.code == 2, result.text[-3000:]
        assert result.err.count(f"hvd_ddp: Step {STEPS} can't be saved") == 1, result.err
        assert result.err.count("\n") == 1, result.err
        assert (summary(folder)["status"], summary(folder)["steps"]) == ("failed", STEPS)
        assert not (folder / "lock.json").exists()


def once_saved(step: int, folder: Path, then: Callable[[], object]) -> Callable[[], None]:
    """Wait for that checkpoint, which is written while training goes on, and do it then."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while [row for row in rows(folder, "save") if row["step"] == step] == []:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        then()

    return wait


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


@pytest.mark.parametrize("where", ["", "checkpoints"])
def test_read_only_for_a_while(
    where: str, train: Cli, at: dict, tmp_path: Path, wanted: dict[str, torch.Tensor]
) -> None:
    folder = tmp_path / "run"
    closed = read_only(folder / where)
    at[6], at[13] = once_saved(4, folder, closed.__enter__), lambda: closed.__exit__(None, None, None)
    result = train("--run-dir", str(folder))
    assert result.code == 0, result.text
    assert "the checkpoint of step 6 can't be written: Read-only file system" in result.out
    all_there(folder, wanted)


def test_read_only_to_the_end(train: Cli, at: dict, tmp_path: Path, wanted: dict[str, torch.Tensor]) -> None:
    folder = tmp_path / "run"
    closed = read_only(folder)
    at[6] = once_saved(4, folder, closed.__enter__)
    result = train("--run-dir", str(folder))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".log"}
    closed.__exit__(None, None, None)
    assert result.code == 2, result.text
    assert f"Step {STEPS} can't be saved in `{folder}/checkpoints`: Read-only file system" in result.err
    assert summary(folder)["status"] == "running"  # nobody could write anything else
    assert all(path.read_bytes() == content for path, content in before.items())
    at.clear()
    assert train("--run-dir", str(folder)).code == 0
    assert [row["step"] for row in rows(folder, "resume")] == [4]
    assert different(tensors(newest(folder)), wanted) == []


@pytest.mark.parametrize("comes_back", [True, False])
def test_rank_0_sees_an_empty_directory_all_of_a_sudden(
    comes_back: bool, train: Cli, at: dict, tmp_path: Path, wanted: dict[str, torch.Tensor]
) -> None:
    """As when the disk is gone, and what it was mounted on is seen: nothing is written there."""
    folder = tmp_path / "run"
    hidden = disk(folder, "size=20m")
    at[6] = once_saved(4, folder, hidden.__enter__)
    seen: list[str] = []

    def come_back() -> None:
        seen.extend(os.listdir(folder))
        hidden.__exit__(None, None, None)

    if comes_back:
        at[13] = come_back
    result = train("--run-dir", str(folder))
    if not comes_back:
        come_back()
    assert seen == []
    if comes_back:
        assert result.code == 0, result.text
        all_there(folder, wanted)
    else:
        assert result.code == 2, result.text
        assert f"Step {STEPS} can't be saved in `{folder}/checkpoints`: No such file or directory" in result.err
        assert steps(folder)[-1] == 4


HIDE = """
if [ "$RANK" = "$1" ]; then
    exec unshare -m sh -c 'mount -t tmpfs none "$2" && shift 2 && exec "$@"' sh "$@"
fi
shift 2 && exec "$@"
"""


def with_an_empty_directory(rank: int, folder: Path, *options: str) -> Result:
    """Two ranks, one of which sees nothing in the run directory, in a mount namespace of its own."""
    program = [sys.executable, "-m", "hvd_ddp", "train", *OPTIONS, *options, "--run-dir", str(folder)]
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "--no-python"]
    paths = f"{ROOT}:{ROOT / 'tests'}"
    return run([*torchrun, "sh", "-c", HIDE, "sh", str(rank), str(folder), *program], PYTHONPATH=paths)


def test_a_rank_that_sees_an_empty_directory(tmp_path: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Another than rank 0 needs nothing of it. Rank 0 would begin again at step 0, and so it is refused."""
    folder = tmp_path / "run"
    folder.mkdir()
    result = with_an_empty_directory(1, folder, "--max-steps", "4")
    assert result.code == 0, result.text[-3000:]
    assert steps(folder) == [2, 4]
    assert os.listdir(folder / "logs/0") == ["rank_0000.log"]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result = with_an_empty_directory(0, folder)
    assert result.code != 0
    said = f"sees `step_00000004.pt` in `{folder}`, rank 0 on {os.uname().nodename} sees no checkpoint"
    assert result.err.count(said) == 1, result.text[-3000:]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    result = with_an_empty_directory(1, folder)
    assert result.code == 0, result.text[-3000:]
    assert [row["step"] for row in rows(folder, "resume")] == [4]
    assert newest(folder)["progress"]["step"] == STEPS


def test_a_run_that_can_not_begin_leaves_no_lock(cli: Cli, tmp_path: Path) -> None:
    with disk(tmp_path / "tiny", "size=4k") as folder:
        result = cli(*OPTIONS, "--run-dir", str(folder))
        assert result.code == 2, result.text
        assert "can't be written: No space left on device" in result.err
        assert not (folder / "lock.json").exists()
