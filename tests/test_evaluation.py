"""Evaluation counts each sample exactly once, on any number of ranks, with any remainder."""

import json
from pathlib import Path

import pytest
from launchers import command, run, train

from hvd_ddp.checkpoint import save
from hvd_ddp.commands.trained import Choice, read
from hvd_ddp.errors import HvdDDPError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation") / "run"
    result = train("python", 1, "--max-steps", "23", "--run-dir", str(folder))
    assert result.code == 0, result.text[-3000:]
    return folder


def evaluated(launcher: str, num_ranks: int, *arguments: str) -> dict:
    result = run(command(launcher, num_ranks, ["-m", "hvd_ddp", "evaluate", *arguments, "--json", "--threads", "1"]))
    assert result.code == 0, result.text[-3000:]
    return json.loads(result.out)


def test_the_same_figures_on_one_to_four_ranks(checkpoint: Path) -> None:
    """360 samples over 1, 2, 3 and 4 ranks, and under Horovod."""
    whole = evaluated("python", 1, str(checkpoint))
    assert whole["num_samples"] == 360
    assert 0.8 < whole["accuracy"] < 1
    summary = json.loads((checkpoint / "summary.json").read_text())
    assert summary["accuracy"] == whole["accuracy"]
    for launcher, num_ranks in (("torchrun", 2), ("mpirun", 3), ("torchrun", 4)):
        there = evaluated(launcher, num_ranks, str(checkpoint))
        assert there["num_samples"] == 360
        assert there["accuracy"] == whole["accuracy"]
        assert there["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    file = checkpoint / "checkpoints/step_00000023.pt"
    there = evaluated("--nproc", 2, str(file), "--backend", "horovod")
    assert (there["num_samples"], there["accuracy"]) == (360, whole["accuracy"])


def test_remainders(tmp_path: Path) -> None:
    """1,797-style sizes that do not divide: in training's own evaluation, ranks without a sample included."""
    program = tmp_path / "remainders.py"
    program.write_text(
        "import json, sys, numpy as np, torch\n"
        "from torch import nn\n"
        "from hvd_ddp import connect\n"
        "from hvd_ddp.config import TrainConfig\n"
        "from hvd_ddp.data.arrays import ArrayDataset, Data\n"
        "from hvd_ddp.data.feed import Rank, feed\n"
        "from hvd_ddp.evaluation import evaluate\n"
        "from hvd_ddp.precision import Precision\n"
        "from hvd_ddp.tasks import Classification\n"
        "with connect(threads=1, device='cpu') as backend:\n"
        "    torch.manual_seed(0)\n"
        "    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))\n"
        "    rows = []\n"
        "    for size in (1797, 257, 7, 3, 1):\n"
        "        random = np.random.default_rng(size)\n"
        "        images = random.integers(0, 256, (size, 1, 4, 4), dtype=np.uint8)\n"
        "        data = ArrayDataset(images, random.integers(0, 3, size, dtype=np.int64))\n"
        "        data = Data('noise', data, data, 3, (128.0,), (64.0,))\n"
        "        rank = Rank(backend.launch.rank, backend.launch.world_size, 1)\n"
        "        here = {'device': backend.device, 'dtype': torch.float64, 'agree': None}\n"
        "        batches = feed(TrainConfig(global_batch=1), data, rank, **here)\n"
        "        model.double()\n"
        "        numbers = Precision('fp64', backend.device)\n"
        "        rows.append(evaluate(model, batches, task=Classification(), precision=numbers, backend=backend))\n"
        "    if backend.is_main:\n"
        "        print(json.dumps(rows))\n"
    )
    rows = []
    for launcher, num_ranks in (("python", 1), ("torchrun", 2), ("mpirun", 3), ("mpirun", 4)):
        result = run(command(launcher, num_ranks, [str(program)]), cwd=tmp_path)
        assert result.code == 0, result.text[-3000:]
        rows.append(json.loads(result.out.strip().splitlines()[-1]))
    assert [row["num_samples"] for row in rows[0]] == [1797, 257, 7, 3, 1]
    for other in rows[1:]:
        for there, wanted in zip(other, rows[0], strict=True):
            assert (there["num_samples"], there["accuracy"]) == (wanted["num_samples"], wanted["accuracy"])
            assert there["loss"] == pytest.approx(wanted["loss"], rel=1e-12)


def test_of_a_run_directory_the_best_one(checkpoint: Path, tmp_path: Path) -> None:
    folder = checkpoint / "checkpoints"
    assert read(Choice(checkpoint, best=True)) == (folder / "step_00000023.pt").read_bytes()
    with pytest.raises(HvdDDPError, match="--best is of a run directory"):
        read(Choice(folder / "step_00000023.pt", best=True))
    with pytest.raises(HvdDDPError, match="no whole checkpoint"):
        read(Choice(tmp_path, best=True))
    for best, words in ((None, "nothing has been evaluated"), ({"step": 7, "accuracy": 0.5}, "step_00000007.pt")):
        save(tmp_path / "checkpoints", 9, {"decisions": {"best": best}}, keep=1)
        with pytest.raises(HvdDDPError, match=words):
            read(Choice(tmp_path, best=True))
