"""--track: the real TensorBoard, MLflow and Weights & Biases, read back; what each may not do to a training."""

import json
import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import disk
from launchers import ROOT, Result, assert_none_left, environment, run
from mlflow import MlflowClient
from rundir import rows, summary
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from hvd_ddp.job.launch import restore
from hvd_ddp.trackers import TRACKERS, About, Trackers

Cli = Callable[..., Result]
SMALL = ["--model", "factories:Small", "--threads", "1", "--log-every", "2", "--save-every", "10", "--keep", "99"]
SECRETS = {"WANDB_API_KEY": "5ec2e7" * 8, "MLFLOW_TRACKING_PASSWORD": "pa55-w0rd", "SOME_TOKEN": "t0p-5ec2e7"}


@pytest.fixture(autouse=True)
def plain_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MLflow may read them here; what trackers set is undone."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    yield
    restore()


def train(run_dir: Path, *options: str, num_ranks: int = 2, **env: str) -> Result:
    """Of two ranks the second has nothing to tell."""
    command = [sys.executable, "-m", "hvd_ddp", "--nproc", str(num_ranks), *SMALL, "--run-dir", str(run_dir), *options]
    ours = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "MLFLOW_ALLOW_FILE_STORE": "", "MARK": f"mark of {run_dir}"}
    result = run(command, cwd=run_dir.parent, **ours, **env)
    assert_none_left(ours["MARK"])
    return result


def numbers(row: dict[str, Any], before: str) -> Iterator[tuple[str, float]]:
    """All of a line of metrics.jsonl, with the names that trackers are to show."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{before}/{name}")
        elif not isinstance(value, str) and name != "step":
            yield f"{before}/{name}", math.nan if value is None else value


def told(run_dir: Path) -> dict[tuple[str, int], float]:
    """What metrics.jsonl says of each step; a resume takes back what came after its checkpoint."""
    found: dict[tuple[str, int], float] = {}
    for line in rows(run_dir, "train", "eval", "resume"):
        if line["kind"] == "resume":
            found = {(name, step): value for (name, step), value in found.items() if step <= line["step"]}
        else:
            found |= {(name, line["step"]): value for name, value in numbers(line, line["kind"])}
    return found


def in_tensorboard(run_dir: Path) -> tuple[dict[tuple[str, int], float], str]:
    """Scalars, each step once, and the configuration."""
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    found = [(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    assert len({(tag, step) for tag, step, _ in found}) == len(found)
    (text,) = events.Tensors("config/text_summary")[-1].tensor_proto.string_val
    return {(tag, step): value for tag, step, value in found}, text.decode()


def in_mlflow(run_dir: Path, name: str) -> tuple[dict[tuple[str, int], float], dict[str, str], str]:
    """Metrics of the run of that name, its parameters, and how it ended."""
    client = MlflowClient((run_dir / "mlflow").as_uri())
    (experiment,) = [one for one in client.search_experiments() if one.name == "hvd_ddp"]
    (found,) = [one for one in client.search_runs([experiment.experiment_id]) if one.info.run_name == name]
    metrics = {
        (metric.key, metric.step): metric.value
        for key in found.data.metrics
        for metric in client.get_metric_history(found.info.run_id, key)
    }
    return metrics, found.data.params, found.info.status


def in_wandb(run_dir: Path, name: str) -> tuple[dict[tuple[str, int], float], dict[str, Any], int]:
    """History of the offline run of that name, its configuration, and its exit code."""
    for path in (run_dir / "wandb").glob("offline-run-*/*.wandb"):
        records = list(wandb_records(path.read_bytes()))
        (begun,) = [record.run for record in records if record.HasField("run")]
        if begun.display_name == name:
            break
    history = {}
    for record in records:
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        history |= {(key, row["step"]): value for key, value in row.items() if "/" in key}
    (code,) = [record.exit.exit_code for record in records if record.HasField("exit")]
    return history, {item.key: json.loads(item.value_json) for item in begun.config.update}, code


def wandb_records(data: bytes) -> Iterator[Record]:
    """Of a file of blocks of 32 KiB; a record has parts, each with its length and whether it is the last."""
    at, block, whole = 7, 1 << 15, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack("<4xHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""


def same(found: dict[tuple[str, int], float], wanted: dict[tuple[str, int], float], tolerance: float = 0.0) -> None:
    """All that is wanted is there and nothing else."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert math.isclose(found[key], value, rel_tol=tolerance, abs_tol=tolerance), (key, found[key], value)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_run_that_goes_on(run_dir: Path) -> None:
    """After its checkpoint was lost it does ten steps again. The trackers of a start are its own choice."""
    first = train(run_dir, "--max-steps", "30", "--track", "tensorboard", "mlflow", "wandb", **SECRETS)
    assert first.code == 0, first.text[-3000:]
    before = told(run_dir)
    assert {name for name, _ in before} >= {"train/loss", "train/phases/forward", "train/lr", "eval/accuracy"}
    same(in_tensorboard(run_dir)[0], before, 1e-6)  # float32
    metrics, params, status = in_mlflow(run_dir, "run-0")
    same(metrics, before)
    history, config, code = in_wandb(run_dir, "run-0")
    same(history, before)
    assert (status, code) == ("FINISHED", 0)
    assert (params["world_size"], params["global_batch"], params["backend"]) == ("2", "64", "ddp")
    assert (config["world_size"], config["global_batch"], config["backend"]) == (2, 64, "ddp")

    for path in [*(run_dir / "checkpoints").glob("step_0000002[1-9].*"), *(run_dir / "checkpoints").glob("*30.*")]:
        path.unlink()
    second = train(run_dir, "--max-steps", "40", "--track", "tensorboard", num_ranks=1, **SECRETS)
    assert second.code == 0 and "step 20 of 40" in second.out, second.text[-3000:]
    scalars, text = in_tensorboard(run_dir)
    same(scalars, told(run_dir), 1e-6)
    assert {step for _, step in scalars} == {*range(2, 41, 2), 23}
    assert "max_steps: 40" in text and "backend: local" in text and "track: tensorboard" in text
    assert len([*(run_dir / "wandb").glob("offline-run-*")]) == 1

    written = [path for path in run_dir.rglob("*") if path.is_file()]
    for secret in (*SECRETS.values(), *(f"{name}" for name in SECRETS)):
        assert not [path for path in written if secret.encode() in path.read_bytes()]
        assert secret not in first.text + second.text


def test_a_failed_run_says_so(run_dir: Path) -> None:
    result = train(run_dir, "--model", "factories:Faulty", "--track", "mlflow", FAULT="throw@1")
    assert result.code == 1, result.text[-3000:]
    assert in_mlflow(run_dir, "run-0")[2] == "FAILED"


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package(name: str, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before anything is written."""
    module, package = TRACKERS[name]
    monkeypatch.delitem(sys.modules, module, raising=False)
    for missing in [name, *(["torch.utils.tensorboard"] if name == "tensorboard" else [])]:
        monkeypatch.setitem(sys.modules, missing, None)
    result = cli("--track", name)
    assert result.code == 2 and f"pip install {package}" in result.err, result.text
    assert "Traceback" not in result.err and not [*Path().iterdir()]


def test_an_unknown_one(cli: Cli) -> None:
    result = cli("--track", "clearml")
    assert result.code == 2 and "clearml" in result.err and "wandb" in result.err, result.text


def test_nothing_is_imported_that_was_not_asked_for() -> None:
    code = "import sys, hvd_ddp.run; print({'tensorboard', 'mlflow', 'wandb'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "set()", result


def test_a_server_that_is_gone(run_dir: Path) -> None:
    """One warning, without the password of its address; the training is as it would be."""
    server = "http://me:pa55-w0rd@127.0.0.1:9"
    env = {"MLFLOW_TRACKING_URI": server, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    result = train(run_dir, "--max-steps", "30", "--track", "mlflow", "tensorboard", num_ranks=1, **env)
    assert result.code == 0, result.text[-3000:]
    assert result.out.count("--track mlflow ends here") == 1 and "pa55-w0rd" not in result.text
    assert summary(run_dir)["status"] == "finished" and not (run_dir / "mlflow").exists()
    same(in_tensorboard(run_dir)[0], told(run_dir), 1e-6)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_full_disk(tmp_path: Path) -> None:
    said: list[str] = []
    with disk(tmp_path / "run", "size=256k") as folder:
        (folder / "filler").write_bytes(b"x" * (200 << 10))
        trackers = Trackers(["tensorboard"], warn=said.append)
        trackers.open(About(folder, 0, 0, {}))
        for step in range(400):
            trackers.row("train", step, {f"number {n}": 0.5 for n in range(10)})
        trackers.close("finished")
    assert len(said) == 1 and "--track tensorboard ends here: " in said[0] and "No space left" in said[0], said


class Stuck:
    """A tracker whose server never answers."""

    free = threading.Event()

    def __init__(self, about: About) -> None:
        Stuck.free.wait()

    def row(self, kind: str, step: int, values: dict[str, float]) -> None:
        raise AssertionError

    def close(self, status: str) -> None:
        raise AssertionError


def test_one_that_does_not_keep_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs no time but what its end is given, and one warning."""
    monkeypatch.setitem(TRACKERS, "stuck", ("test_trackers", "nothing"))
    monkeypatch.setattr("test_trackers.Tracker", Stuck, raising=False)
    for num_rows, why in ((5, "6 lines still wait for it"), (20_000, "10000 lines wait for it")):
        said: list[str] = []
        trackers = Trackers(["stuck"], warn=said.append)
        trackers.open(About(Path(os.devnull), 0, 0, {}))
        for step in range(num_rows):
            trackers.row("train", step, {"loss": 1.0})
        trackers.close("finished", within=0.1)
        assert said == [f"--track stuck ends here: {why}"]
    Stuck.free.set()
