"""The rows of "The life of a run" that succeed: what a start does to what its run directory holds.

The rows that are refused are in test_bad_input.py; that cut runs end with the same bits is in test_resume.py.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from launchers import Result, train

from hvd_ddp.main import main

SMALL = ["--model", "factories:Small", "--threads", "1", "--log-every", "1"]
STEPS = 23  # of an epoch of the digits at the default batch of 64
Cli = Callable[..., Result]


@pytest.fixture
def cli(cli: Cli) -> Cli:
    """`python -m hvd_ddp ...` with the small model."""
    return lambda *arguments: cli(*SMALL, *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    folder = tmp_path_factory.mktemp("life") / "run"
    assert main([*SMALL, "--max-steps", "3", "--run-dir", str(folder)]) == 0
    return folder


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def state(folder: Path, step: int) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / f"checkpoints/step_{step:08d}.pt", weights_only=True)
    return loaded


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Model and optimizer, bit for bit."""
    assert one["model"].keys() == other["model"].keys()
    tensors = [(one["model"][name], other["model"][name]) for name in one["model"]]
    for index, entry in one["optimizer"]["state"].items():
        tensors += [(value, other["optimizer"]["state"][index][name]) for name, value in entry.items()]
    return all(torch.equal(a, b) for a, b in tensors)


def test_nothing_there(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "new" / "run"
    result = cli("--max-steps", "3", "--run-dir", str(folder))
    assert result.code == 0, result.text
    assert result.err == ""
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints", "config.yaml", "logs", "metrics.jsonl", "summary.json"
    ]  # fmt: skip
    assert [line["step"] for line in metrics(folder, "train")] == [1, 2, 3]
    assert (summary(folder)["status"], summary(folder)["restart"], summary(folder)["steps"]) == ("finished", 0, 3)
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        "step_00000003.pt", "step_00000003.pt.sha256"
    ]  # fmt: skip
    assert list((tmp_path / "cwd").iterdir()) == []


def test_an_empty_folder_that_is_there(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for resume in ("auto", "never"):
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        for name in ("config.yaml", "summary.json", "metrics.jsonl"):
            (folder / name).unlink(missing_ok=True)
        assert cli("--max-steps", "1", "--resume", resume, "--run-dir", str(folder)).code == 0
        assert (folder / "notes.txt").read_text() == "mine"


def test_a_name_is_found_where_none_is_given(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the time, or of the scheduler's job, so that a requeued job finds its run."""
    assert cli("--max-steps", "1").code == 0
    (folder,) = (tmp_path / "cwd" / "runs").iterdir()
    assert folder.name.endswith("-digits-factories-Small")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert cli("--max-steps", "1").code == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert cli("--max-steps", "2").code == 0
    requeued = tmp_path / "cwd" / "runs" / "job-4711"
    assert [line["step"] for line in metrics(requeued, "train")] == [1, 2]
    assert summary(requeued)["job"] == "4711"


def test_the_same_again_on_a_finished_run(run_dir: Path, cli: Cli) -> None:
    before = snapshot(run_dir)
    for more in ([], ["--keep", "1"], ["--accumulate", "2"], ["--save-every", "1"], ["--backend", "ddp"]):
        result = cli("--max-steps", "3", "--run-dir", str(run_dir), *more)
        assert result.code == 0, result.text
        assert "already finished" in result.out
        assert result.err == ""
        assert snapshot(run_dir) == before


def test_the_same_again_with_two_ranks(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    before = snapshot(run_dir)
    result = train("mpirun", 2, *SMALL, "--max-steps", "3", "--run-dir", str(run_dir), cwd=Path(__file__).parent)
    assert result.code == 0, result.text
    assert result.out.count("already finished") == 1
    assert snapshot(run_dir) == before


@pytest.mark.parametrize("schedule", ["constant", "step"])
def test_more_steps_go_on(schedule: str, cli: Cli, tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    at = ["--schedule", schedule, "--decay-every", "1"]
    assert cli(*at, "--max-steps", "22", "--run-dir", str(folder)).code == 0
    result = cli(*at, "--max-steps", "25", "--run-dir", str(folder))
    assert result.code == 0, result.text
    assert "resuming from" in result.out
    assert [line["step"] for line in metrics(folder, "train")] == [*range(1, 26)]
    assert [line["step"] for line in metrics(folder, "resume")] == [22]
    assert [line["restart"] for line in metrics(folder, "start")] == [0, 1]
    assert (summary(folder)["restart"], summary(folder)["steps"]) == (1, 25)
    assert yaml.safe_load((folder / "config.yaml").read_text())["max_steps"] == 25
    assert cli(*at, "--max-steps", "25", "--run-dir", str(whole)).code == 0
    assert same(state(folder, 25), state(whole, 25))


def test_more_epochs_go_on(cli: Cli, tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    assert cli("--epochs", "1", "--run-dir", str(folder)).code == 0
    assert cli("--epochs", "2", "--run-dir", str(folder)).code == 0
    assert summary(folder)["epochs"] == 2
    assert cli("--epochs", "2", "--run-dir", str(whole)).code == 0
    assert same(state(folder, 2 * STEPS), state(whole, 2 * STEPS))


def test_the_same_target_in_other_words(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert cli("--epochs", "1", "--run-dir", str(folder)).code == 0
    before = snapshot(folder)
    assert "already finished" in cli("--max-steps", str(STEPS), "--run-dir", str(folder)).out
    assert snapshot(folder) == before


def test_cosine_of_the_same_length_goes_on_where_it_was_cut(cli: Cli, tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    at = ["--schedule", "cosine", "--warmup-steps", "2", "--max-steps", "6", "--save-every", "1", "--keep", "9"]
    assert cli(*at, "--run-dir", str(whole)).code == 0
    shutil.copytree(whole, folder)
    for step in (4, 5, 6):  # as it was after step 3
        for end in ("", ".sha256"):
            (folder / f"checkpoints/step_{step:08d}.pt{end}").unlink()
    (folder / "summary.json").write_text(json.dumps(summary(whole) | {"status": "running"}))
    assert cli(*at, "--run-dir", str(folder)).code == 0
    assert [line["step"] for line in metrics(folder, "resume")] == [3]
    assert same(state(folder, 6), state(whole, 6))


def test_all_kinds_of_random_numbers_go_on(cli: Cli, tmp_path: Path) -> None:
    """The model draws from torch, numpy and `random`, in its forward; and whatever was drawn elsewhere is nothing."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    at = ["--model", "factories:Wide"]
    assert cli(*at, "--max-steps", "6", "--run-dir", str(whole)).code == 0
    assert cli(*at, "--max-steps", "3", "--run-dir", str(folder)).code == 0
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    assert cli(*at, "--max-steps", "6", "--run-dir", str(folder)).code == 0
    assert same(state(folder, 6), state(whole, 6))


def test_the_best_evaluation_is_kept_and_known(cli: Cli, tmp_path: Path) -> None:
    """The rate grows far too high; the best one is saved also where no save is due, and known after a restart."""
    folder = tmp_path / "run"
    at = ["--optimizer", "sgd", "--momentum", "0", "--schedule", "step", "--decay-every", "1", "--decay-factor", "300",
          "--lr", "0.05", "--keep", "1", "--save-every", "1000", "--run-dir", str(folder)]  # fmt: skip
    seen = []
    for epochs in (3, 4, 5):
        assert cli(*at, "--epochs", str(epochs)).code == 0
        found = {line["step"]: line["accuracy"] for line in metrics(folder, "eval")}
        best = max(found, key=lambda step: found[step])
        seen.append(best)
        assert summary(folder)["best"] == {"step": best, "accuracy": found[best]}
        assert state(folder, epochs * STEPS)["decisions"]["best"] == summary(folder)["best"]
        names = [path.name for path in (folder / "checkpoints").glob("*.pt")]
        assert sorted(names) == [f"step_{step:08d}.pt" for step in sorted({best, epochs * STEPS})]
    assert seen[1] < 4 * STEPS, "else it tests nothing"


def test_a_model_whose_state_could_not_be_loaded_is_refused_before_it_trains(cli: Cli, tmp_path: Path) -> None:
    result = cli("--model", "factories:Keeps", "--max-steps", "3", "--run-dir", str(tmp_path / "run"))
    assert result.code == 2, result.text
    assert "`model._extra_state.where` in the state of this run is a `pathlib.PosixPath`" in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "run").exists()


def test_a_model_whose_state_goes_bad_is_refused_when_it_is_saved(cli: Cli, tmp_path: Path) -> None:
    result = cli("--model", "factories:KeepsLater", "--max-steps", "9", "--save-every", "2",
                 "--run-dir", str(tmp_path / "run"))  # fmt: skip
    assert result.code == 2, result.text
    assert "`model._extra_state.last` in the state of this run is a `numpy.float64`" in result.err
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("*.pt")] == ["step_00000002.pt"]
    assert summary(tmp_path / "run")["status"] == "failed"


# A run that was cut may go on with other ...
FREE = {
    "backend": ["--backend", "ddp"],
    "accumulation": ["--accumulate", "2"],
    "keep": ["--keep", "1"],
    "save-every": ["--save-every", "2"],
    "eval-every": ["--eval-every", "2"],
    "log-every": ["--log-every", "2"],
    "timeouts": ["--timeout", "77", "--start-timeout", "78"],
    "unused parameters": ["--find-unused-parameters"],
    "data folder": ["--data-dir", "/nowhere"],
}


@pytest.mark.parametrize("what", FREE)
def test_a_run_goes_on_with_another(what: str, run_dir: Path, cli: Cli) -> None:
    result = cli("--max-steps", "5", "--run-dir", str(run_dir), *FREE[what])
    assert result.code == 0, result.text
    assert [line["step"] for line in metrics(run_dir, "resume")] == [3]
    assert summary(run_dir)["steps"] == 5


def test_a_run_goes_on_under_another_launcher_and_number_of_ranks(run_dir: Path, cli: Cli, tmp_path: Path) -> None:
    """One rank, then two under mpirun, then one again: float64 sums differ in their order alone."""
    whole, folder = tmp_path / "whole", tmp_path / "fp64"
    at = ["--precision", "fp64"]
    assert cli(*at, "--max-steps", "7", "--run-dir", str(whole)).code == 0
    assert cli(*at, "--max-steps", "3", "--run-dir", str(folder)).code == 0
    options = [*SMALL, *at, "--max-steps", "5", "--run-dir", str(folder)]
    result = train("mpirun", 2, *options, cwd=Path(__file__).parent)
    assert result.code == 0, result.text
    assert [line["world_size"] for line in metrics(folder, "start")] == [1, 2]
    assert cli(*at, "--max-steps", "7", "--run-dir", str(folder)).code == 0
    for name, tensor in state(whole, 7)["model"].items():
        difference = (state(folder, 7)["model"][name] - tensor).norm() / tensor.norm()
        assert difference < 1e-12, name


def test_resume_a_file_of_another_run(finished: Path, cli: Cli, tmp_path: Path) -> None:
    folder, whole = tmp_path / "second", tmp_path / "whole"
    before = snapshot(finished)
    file = finished / "checkpoints" / "step_00000003.pt"
    result = cli("--resume", str(file), "--max-steps", "5", "--run-dir", str(folder))
    assert result.code == 0, result.text
    assert [line["step"] for line in metrics(folder, "train")] == [4, 5]
    assert metrics(folder, "resume")[0]["file"] == str(file)
    assert snapshot(finished) == before
    assert cli("--max-steps", "5", "--run-dir", str(whole)).code == 0
    assert same(state(folder, 5), state(whole, 5))
    again = cli("--max-steps", "5", "--run-dir", str(folder))
    assert "already finished" in again.out


def test_resume_a_file_after_a_start_that_died_early(finished: Path, run_dir: Path, cli: Cli) -> None:
    """Without checkpoints of its own there is nothing to lose."""
    shutil.rmtree(run_dir / "checkpoints")
    file = finished / "checkpoints" / "step_00000003.pt"
    assert cli("--resume", str(file), "--max-steps", "4", "--run-dir", str(run_dir)).code == 0
    assert (run_dir / "checkpoints" / "step_00000004.pt").exists()


def test_a_start_that_died_before_its_first_checkpoint_starts_again(run_dir: Path, cli: Cli) -> None:
    for path in (run_dir / "checkpoints").iterdir():
        path.unlink()
    (run_dir / "summary.json").write_text(json.dumps(summary(run_dir) | {"status": "running"}))
    assert cli("--max-steps", "3", "--run-dir", str(run_dir)).code == 0
    assert [line["step"] for line in metrics(run_dir, "train")] == [1, 2, 3, 1, 2, 3]
    assert summary(run_dir)["restart"] == 1


def test_a_broken_newest_checkpoint_is_passed_over_and_said(cli: Cli, tmp_path: Path) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    at = ["--save-every", "1", "--keep", "9"]
    assert cli(*at, "--max-steps", "4", "--run-dir", str(folder)).code == 0
    newest = folder / "checkpoints" / "step_00000004.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    (folder / "checkpoints" / "step_00000003.pt.sha256").unlink()
    result = cli(*at, "--max-steps", "5", "--run-dir", str(folder))
    assert result.code == 0, result.text
    assert "passed over" in result.out
    assert "step_00000004.pt" in result.out
    assert "step_00000003.pt" in result.out
    assert "resuming from" in result.out
    assert [line["step"] for line in metrics(folder, "resume")] == [2]
    assert cli("--max-steps", "5", "--run-dir", str(whole)).code == 0
    assert same(state(folder, 5), state(whole, 5))


def test_weights_of_another_run_begin_a_new_one(finished: Path, cli: Cli, tmp_path: Path) -> None:
    """--init takes the weights and nothing else."""
    folder = tmp_path / "tuned"
    file = finished / "checkpoints" / "step_00000003.pt"
    assert cli("--init", str(file), "--lr", "1e-30", "--max-steps", "1", "--run-dir", str(folder)).code == 0
    assert [line["step"] for line in metrics(folder, "train")] == [1]
    for name, tensor in state(finished, 3)["model"].items():
        assert torch.equal(state(folder, 1)["model"][name], tensor)
    assert state(folder, 1)["progress"]["step"] == 1


def test_a_run_goes_on_when_the_weights_that_it_began_with_are_gone(finished: Path, cli: Cli, tmp_path: Path) -> None:
    """The checkpoint has its own: the same command on a run that was cut goes on."""
    first = Path(shutil.copy(finished / "checkpoints" / "step_00000003.pt", tmp_path / "first.pt"))
    at = ["--init", str(first), "--run-dir", str(tmp_path / "tuned")]
    assert cli(*at, "--max-steps", "1").code == 0
    first.unlink()
    result = cli(*at, "--max-steps", "2")
    assert result.code == 0, result.text


def test_the_options_of_a_run_start_it_again(run_dir: Path, cli: Cli, tmp_path: Path) -> None:
    """config.yaml is a file for --config, and leads to the same run."""
    config = Path(shutil.copy(run_dir / "config.yaml", tmp_path / "options.yaml"))
    before = snapshot(run_dir)
    result = cli("--config", str(config), "--run-dir", str(run_dir))
    assert result.code == 0, result.text
    assert "already finished" in result.out
    assert snapshot(run_dir) == before
    other = tmp_path / "other"
    assert cli("--config", str(config), "--run-dir", str(other)).code == 0
    assert same(state(run_dir, 3), state(other, 3))
