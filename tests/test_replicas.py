"""Ranks that hold different models are found within the interval, and never when all is well."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from launchers import ROOT, Result, command, run

from hvd_ddp.replicas import PIECE, _checksum

PARTS = """
import json, sys, torch
from torch import nn
from hvd_ddp import HvdDDPError, connect
from hvd_ddp.replicas import check_replicas

def said(backend, model, optimizer, **options):
    try:
        check_replicas(backend, model, optimizer, step=7, **options)
    except HvdDDPError as error:
        return str(error)
    return None

with connect(threads=1, device="cpu", backend=sys.argv[1]) as backend:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    last = backend.launch.rank == backend.launch.world_size - 1
    answers = [said(backend, model, optimizer)]
    model[1].running_mean += backend.launch.rank
    answers.append(said(backend, model, optimizer))
    answers.append(said(backend, model, optimizer, buffers=True))
    moment = optimizer.state[model[0].weight]["exp_avg"]
    moment[1, 1] += 1e-7 if last else 0.0
    answers.append(said(backend, model, optimizer))
    model[2].bias.data.mul_(-1 if last else 1)
    answers.append(said(backend, model, optimizer))
    together = backend.all_gather_object(answers)
    if backend.is_main:
        assert all(each == answers for each in together)
        print(json.dumps(answers))
"""


@pytest.mark.parametrize(("launcher", "num_ranks", "backend"), [("torchrun", 2, "ddp"), ("mpirun", 3, "horovod")])
def test_what_differs_is_named(launcher: str, num_ranks: int, backend: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PARTS)
    result = run(command(launcher, num_ranks, ["program.py", backend]), cwd=tmp_path)
    assert result.code == 0, result.text[-3000:]
    well, averaged, buffer, moment, both = json.loads(result.out.strip().splitlines()[-1])
    assert well is None and averaged is None
    others = ", ".join(map(str, range(1, num_ranks)))
    assert "after step 7 buffer `1.running_mean` differs" in buffer and f"{others}." in buffer
    assert (
        f"after step 7 the optimizer's `exp_avg` of `0.weight` differs between rank 0 and rank {num_ranks - 1}"
        in moment
    )
    assert "parameter `2.bias` and 1 more differs" in both


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, 3 * PIECE + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checksum_is_of_every_bit(size: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    whole = tensor.view(torch.uint8).numpy().view(np.uint8 if tensor.nbytes % 4 else np.int32)
    assert _checksum(tensor).item() == whole.sum(dtype=np.int64)


TRAINED = """
import sys, torch
from torch import nn
from hvd_ddp import TrainConfig, Trainer, connect
from hvd_ddp.data.datasets import load
from hvd_ddp.job.health import ends_together
from hvd_ddp.tasks import Classification

class Wrong(Classification):
    def losses(self, model, batch):
        if sys.argv[2] == "bare":
            return super().losses(bare, batch)
        if sys.argv[2] == "shift":
            with torch.no_grad():
                bare[1].bias += 1e-6 * backend.launch.rank
        return super().losses(model, batch)

backend = connect(threads=1, device="cpu", backend=sys.argv[1])
with ends_together(backend.meeting, timeout=60), backend:
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    config = TrainConfig(max_steps=40, check_replicas=7, save_every=5, run_dir=sys.argv[3], optimizer="sgd")
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    Trainer(config, bare, optimizer, load("digits"), backend, task=Wrong()).fit()
"""


def trained(launcher: str, backend: str, what: str, folder: Path) -> Result:
    (folder / "program.py").write_text(TRAINED)
    return run(command(launcher, 2, ["program.py", backend, what, "run"]), cwd=folder)


@pytest.mark.parametrize(
    ("launcher", "backend", "what"),
    [("torchrun", "ddp", "bare"), ("torchrun", "ddp", "shift"), ("mpirun", "horovod", "shift")],
)
def test_a_wrong_step_is_caught_before_anything_of_it_is_saved(
    launcher: str, backend: str, what: str, tmp_path: Path
) -> None:
    """At the first check, which comes with the first save, before the interval has passed."""
    result = trained(launcher, backend, what, tmp_path)
    assert result.code != 0, result.text[-3000:]
    assert "The ranks no longer train one model: after step 5 parameter `1." in result.err
    assert not list((tmp_path / "run/checkpoints").glob("*.pt"))


def test_a_right_step_is_not(tmp_path: Path) -> None:
    result = trained("torchrun", "ddp", "right", tmp_path)
    assert result.code == 0, result.text[-3000:]


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("launcher", "backend"), [("--nproc", "ddp"), ("mpirun", "horovod")])
def test_nothing_is_flagged_in_10000_steps(launcher: str, backend: str, tmp_path: Path) -> None:
    program = ["-m", "hvd_ddp", "train", "--threads", "1", "--model", "factories:Small", "--max-steps", "10000",
               "--backend", backend, "--check-replicas", "10", "--run-dir", "run", "--eval-every", "100"]  # fmt: skip
    result = run(command(launcher, 2, program), cwd=tmp_path, timeout=2900, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert result.code == 0, result.text[-3000:]
