"""A rank that fails ends the whole job, and the last lines say which one, where and why."""

import json
import socket
from pathlib import Path

import pytest
import torch
from launchers import ROOT, Result, command, run

# (launcher, backend): how the job's own exit code comes through
CELLS = [("--nproc", "ddp"), ("--nproc", "horovod"), ("mpirun", "ddp"), ("horovodrun", "horovod")]


def start(launcher: str, backend: str, model: str, folder: Path, *options: str) -> Result:
    program = ["-m", "hvd_ddp", "train", "--threads", "1", "--model", f"factories:{model}", "--backend", backend,
               "--run-dir", str(folder / "run"), "--max-steps", "12", "--timeout", "30", *options]  # fmt: skip
    paths = f"{ROOT}:{ROOT / 'tests'}"
    return run(command(launcher, 2, program), timeout=100, cwd=folder, PYTHONPATH=paths)


@pytest.mark.parametrize(("launcher", "backend"), CELLS)
@pytest.mark.parametrize(("model", "rank"), [("Raises", 1), ("RaisesOnMain", 0)])
def test_an_exception_on_one_rank(launcher: str, backend: str, model: str, rank: int, tmp_path: Path) -> None:
    result = start(launcher, backend, model, tmp_path)
    assert result.code == 1, result.text[-3000:]
    said = [line for line in result.text.splitlines() if "failed: " in line]
    assert len(said) == 1, result.text[-3000:]
    assert f"rank {rank} on {socket.gethostname()} failed: RuntimeError: the sensor is on fire" in said[0]
    record = json.loads((tmp_path / f"run/failures/0/rank_{rank:04d}.json").read_text())
    assert (record["rank"], record["host"]) == (rank, socket.gethostname())
    assert "the sensor is on fire" in record["exception"]
    assert "in forward" in record["traceback"]
    assert "the sensor is on fire" in (tmp_path / f"run/logs/0/rank_{rank:04d}.log").read_text()
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"
    assert not (tmp_path / "run/lock.json").exists()


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
@pytest.mark.parametrize("model", ["UnusedOnOneRank", "UnusedOnAll"])
def test_a_parameter_without_a_gradient_is_refused_by_name(backend: str, model: str, tmp_path: Path) -> None:
    result = start("--nproc", backend, model, tmp_path)
    assert result.code == 2, result.text[-3000:]
    assert result.err.count("got no gradient") == 1
    assert "`extra.weight, extra.bias`" in result.err
    assert "--find-unused-parameters" in result.err
    assert "Traceback" not in result.err
    assert not list((tmp_path / "run/checkpoints").glob("*.pt"))


def test_and_trains_the_same_with_find_unused_parameters(tmp_path: Path) -> None:
    states = []
    for backend in ("ddp", "horovod"):
        folder = tmp_path / backend
        folder.mkdir()
        result = start("--nproc", backend, "UnusedOnOneRank", folder, "--find-unused-parameters")
        assert result.code == 0, result.text[-3000:]
        states.append(torch.load(folder / "run/checkpoints/step_00000012.pt", weights_only=True)["model"])
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
