"""predict: each sample once, in order, the same on any number of ranks; nothing is overwritten."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from launchers import ROOT, Result, command, run, train
from rundir import newest

from hvd_ddp.data.datasets import load
from hvd_ddp.models import ConvNet


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict") / "run"
    result = train("python", 1, "--max-steps", "23", "--run-dir", str(folder), "--precision", "fp64")
    assert result.code == 0, result.text[-3000:]
    return folder


def predict(launcher: str, num_ranks: int, cwd: Path, *arguments: str) -> Result:
    program = ["-m", "hvd_ddp", "predict", *arguments, "--threads", "1"]
    return run(command(launcher, num_ranks, program), cwd=cwd, PYTHONPATH=f"{ROOT}:{ROOT / 'tests/data'}")


def test_each_sample_once_in_order_as_torch_says(checkpoint: Path, tmp_path: Path) -> None:
    result = predict("python", 1, tmp_path, str(checkpoint))
    assert result.code == 0 and "predictions.csv: 360 samples, " in result.out, result.text
    text = (tmp_path / "predictions.csv").read_text()
    header, *rows = csv.reader(text.splitlines())
    assert header == ["sample", "target", "prediction", "probability"]
    assert [int(row[0]) for row in rows] == list(range(360))
    data, model = load("digits"), ConvNet(10, 1).double().eval()
    model.load_state_dict(newest(checkpoint)["model"])
    images, targets = np.asarray(data.eval.images, dtype=np.float64), np.asarray(data.eval.targets)
    with torch.no_grad():
        outputs = model((torch.from_numpy(images) - data.mean[0]) / data.std[0]).softmax(1)
    probabilities, classes = (values.numpy() for values in outputs.max(1))
    assert [int(row[1]) for row in rows] == targets.tolist() and [int(row[2]) for row in rows] == classes.tolist()
    assert np.abs(np.array([float(row[3]) for row in rows]) - probabilities).max() < 1e-6
    for launcher, num_ranks, options in (("--nproc", 3, []), ("mpirun", 2, ["--backend", "horovod"])):
        result = predict(launcher, num_ranks, tmp_path, str(checkpoint), "--output", f"{num_ranks}.csv", *options)
        assert result.code == 0, result.text[-3000:]
        assert (tmp_path / f"{num_ranks}.csv").read_text() == text


def test_nothing_is_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "predictions.csv").write_text("mine")
    for arguments, words in (
        ([], "`predictions.csv` is there already"),
        (["--output", "nowhere/predictions.csv"], "`nowhere` is no folder"),
    ):
        result = predict("python", 1, tmp_path, str(checkpoint), *arguments)
        assert result.code == 2 and words in result.err and "Traceback" not in result.err, result.text
    assert (tmp_path / "predictions.csv").read_text() == "mine" and len(list(tmp_path.iterdir())) <= 2
