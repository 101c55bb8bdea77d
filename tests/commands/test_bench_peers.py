"""bench peers: each does the same training, what is not here is named, and what trains something else fails."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from launchers import ROOT, Result, assert_none_left, command, run
from torch.nn import functional

from hvd_ddp.commands.bench_peers import CLOSE, Measured, free_ports, missing, refuse_another_training
from hvd_ddp.commands.peers import PEERS
from hvd_ddp.commands.peers.convnet import averages, put_back, weights
from hvd_ddp.job.spawn import command as spawned
from hvd_ddp.models import SIDE, ConvNet, build
from hvd_ddp.seeding import seed_all

STEPS = 3


def bench(*arguments: str, cwd: Path, code: int = 0, **environment: str) -> Result:
    program = ["-m", "hvd_ddp", "bench", "peers", *arguments]
    result = run(command("python", 1, program), timeout=390, cwd=cwd, **environment)
    assert result.code == code, result.text[-4000:]
    assert_none_left(str(cwd))
    return result


def trained(file: str, folder: Path, *, data: str = "digits", global_batch: int = 32) -> dict[str, torch.Tensor]:
    """The weights that it ends with on two ranks."""
    folder.mkdir()
    options = {"data": data, "data_dir": None, "global_batch": global_batch, "steps": STEPS, "ports": free_ports(2)}
    (folder / "options.json").write_text(json.dumps(options))
    program = ["bench", "peers", "rank", file, str(folder)]
    by_mpirun = command("mpirun", 2, ["-m", "hvd_ddp", *program])
    result = run(by_mpirun if PEERS[file].by_mpirun else spawned(2, "hvd_ddp", program), cwd=folder, timeout=200)
    assert result.code == 0, result.text[-4000:]
    assert json.loads((folder / "result.json").read_text())["steps_per_second"] > 0
    state: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return state


CELLS = [(file, data) for file in list(PEERS)[1:] for data in ("digits", "synthetic:1x12x12:10:400")]
SHORT = [("by_hand", "digits"), ("ours_over_mpi", "digits")]


@pytest.mark.parametrize(
    ("file", "data"), [pytest.param(*cell, marks=[] if cell in SHORT else pytest.mark.full) for cell in CELLS]
)
def test_each_does_the_same_training(file: str, data: str, tmp_path: Path) -> None:
    """Its weights after 24 steps are ours, but for the order of sums. 12 pixels are pooled to 8, 8 are not."""
    if lacking := missing(PEERS[file]):
        pytest.skip(f"not installed: {' '.join(lacking)}")
    ours, theirs = trained("ours", tmp_path / "ours", data=data), trained(file, tmp_path / "theirs", data=data)
    seed_all(0, torch.device("cpu"))
    first = build("convnet", 10, (1, 8, 8)).state_dict()
    for name in first:
        moved = (ours[name] - first[name]).norm()
        assert moved > 0
        assert (ours[name] - theirs[name]).norm() < 1e-3 * moved, name


def test_what_is_here_and_what_is_not(tmp_path: Path) -> None:
    said = json.loads(bench("--json", "--steps", "3", "--repeats", "2", cwd=tmp_path).out)
    names = [row["name"] for row in said["rows"]]
    assert names[:3] == ["hvd_ddp", "hvd_ddp over MPI", "DDP by hand"]
    assert sorted([*names, *said["missing"]]) == sorted(peer.name for peer in PEERS.values())
    for row in said["rows"]:
        assert len(row["repeats"]) == 2 and row["steps_per_second"] == statistics.median(row["repeats"]) > 0
        assert said["losses"][row["name"]] == pytest.approx(said["losses"]["hvd_ddp"], rel=CLOSE)
    *ours, other = (row["repeats"] for row in said["rows"][:3])
    for name, own in zip(names, ours, strict=False):
        wanted = math.sqrt(own[0] * own[1] / other[0] / other[1])
        assert said["ratios"][name]["DDP by hand"] == pytest.approx(wanted)
    assert set(said["ratios"]) == set(said["intervals"]) == set(names[:2])
    assert list(tmp_path.iterdir()) == [], "left behind"


@pytest.mark.full
def test_one_that_fails_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    """Here a JAX that can't be imported."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for name in ("jax", "optax"):
        (libraries / f"{name}.py").write_text("raise RuntimeError('built for another processor')")
    short = ["--json", "--steps", "3", "--repeats", "2"]
    result = bench(*short, cwd=tmp_path, code=1, PYTHONPATH=f"{ROOT}:{libraries}")
    assert "JAX failed: RuntimeError: built for another processor" in result.err
    names = [row["name"] for row in json.loads(result.out)["rows"]]
    assert names[2] == "DDP by hand" and "JAX" not in names


def test_nothing_to_compare_with(tmp_path: Path) -> None:
    result = bench("--repeats", "2", "--global-batch", "9000", cwd=tmp_path, code=1)
    assert "hvd_ddp: The trainer itself failed, so nothing can be compared: --global-batch is `9000`" in result.err
    assert "Traceback" not in result.err


def test_another_training_is_no_comparison() -> None:
    ours, same, other = Measured("hvd_ddp"), Measured("same"), Measured("other")
    ours.losses, same.losses, other.losses = [0.5, 0.5], [0.501, 0.499], [0.501, 0.6]
    nan = Measured("nan", losses=[math.nan])
    refuse_another_training([ours, same, other, nan])
    assert same.failed is None
    assert other.failed == "its loss ended at 0.6, ours at 0.5: it is another training."
    assert nan.failed is not None


def test_weights_with_channels_last_and_back() -> None:
    """What they compute in numpy is what the model computes, pooling too; back they are the same bits."""
    model, other = ConvNet(10, 3), ConvNet(10, 3)
    arrays = weights(model)
    assert [array.shape for array in arrays[::2]] == [
        (3, 3, 3, 64),
        (3, 3, 64, 128),
        (SIDE * SIDE * 128, 256),
        (256, 10),
    ]
    images = torch.randn(2, 3, 12, 20)
    with torch.no_grad():
        wanted, features = model(images).numpy(), model.features[:4](images)
        pooled = functional.adaptive_avg_pool2d(features, SIDE).permute(0, 2, 3, 1).numpy()
    mine = np.einsum("ih,jw,nchw->nijc", averages(12), averages(20), features.numpy())
    assert np.allclose(mine, pooled, atol=1e-6)
    hidden = np.maximum(mine.reshape(2, -1) @ arrays[4] + arrays[5], 0)
    assert np.allclose(hidden @ arrays[6] + arrays[7], wanted, atol=1e-5)
    put_back(other, arrays)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())
