"""--compile, --channels-last and --profile: the same training, in other ways."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launchers import ROOT, Result, command, run
from rundir import newest, tensors

from hvd_ddp.config import TrainConfig
from hvd_ddp.models import ConvNet, move
from hvd_ddp.optim import build, load


def trained(folder: Path, *options: str, launcher: str = "--nproc", backend: str = "ddp", steps: int = 6) -> Result:
    program = ["-m", "hvd_ddp", "train", "--threads", "1", "--backend", backend, "--run-dir", folder.name,
               "--precision", "fp64", "--max-steps", str(steps), *options]  # fmt: skip
    result = run(
        command(launcher, 2, program), cwd=folder.parent, timeout=200,
        PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", TORCHINDUCTOR_CACHE_DIR=f"{folder}.cache",
    )  # fmt: skip
    assert result.code == 0, result.text[-3000:]
    return result


def check_close(one: Path, other: Path, *, close: float = 1e-10) -> None:
    """In float64 only the order of sums differs."""
    mine, theirs = tensors(newest(one)), tensors(newest(other))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=close, atol=close, msg=name)


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "backend"), [("--nproc", "ddp"), ("mpirun", "horovod")])
def test_compiled(launcher: str, backend: str, tmp_path: Path) -> None:
    model = ["--model", "factories:Small"]
    trained(tmp_path / "eager", *model)
    trained(tmp_path / "compiled", *model, "--compile", launcher=launcher, backend=backend)
    check_close(tmp_path / "eager", tmp_path / "compiled")
    assert list(tmp_path.glob("compiled.cache/**/*.so")) and not list(tmp_path.glob("eager.cache/**/*.so"))


@pytest.mark.parametrize(("launcher", "backend"), [("--nproc", "ddp"), ("mpirun", "horovod")])
def test_channels_last(launcher: str, backend: str, tmp_path: Path) -> None:
    trained(tmp_path / "first")
    trained(tmp_path / "last", "--channels-last", launcher=launcher, backend=backend)
    check_close(tmp_path / "first", tmp_path / "last")
    model = move(ConvNet(10, 3), torch.device("cpu"), torch.float64, channels_last=True)
    output = next(model.children())(torch.zeros(2, 3, 8, 8, dtype=torch.float64))
    assert output.is_contiguous(memory_format=torch.channels_last), "pictures follow the weights"


def test_they_may_change_in_a_run(tmp_path: Path) -> None:
    """As the number of ranks may: the same mathematics."""
    trained(tmp_path / "first", steps=4)
    trained(tmp_path / "cut", "--channels-last", steps=2)
    trained(tmp_path / "cut", steps=4)
    check_close(tmp_path / "first", tmp_path / "cut")


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_fused_is_the_same_update(name: str) -> None:
    """Against torch's loops over tensors; half-way what one has kept goes on in the other."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(9, 5, dtype=torch.float64) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    fused, plain = (
        TrainConfig(optimizer=name, lr=0.05, weight_decay=0.1, fused=one)  # type: ignore[arg-type]
        for one in (True, False)
    )
    reference = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    optimizers = [
        reference(models[0].parameters(), lr=0.05, weight_decay=0.1, foreach=False, **momentum),
        build(fused, models[1]),
        build(plain, models[2]),
    ]
    assert [group["fused"] for one in optimizers[1:] for group in one.param_groups] == [True, False]
    for step in range(20):
        if step == 10:
            states = [one.state_dict() for one in optimizers[1:]]
            optimizers[1:] = [build(plain, models[1]), build(fused, models[2])]
            for one, state in zip(optimizers[1:], states, strict=True):
                load(one, state)
        inputs = torch.randn(4, 9, dtype=torch.float64)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    for model in models[1:]:
        torch.testing.assert_close(model.weight, models[0].weight, rtol=1e-12, atol=1e-13)


class Strided(torch.nn.Module):
    """Its parameter is every second number of a larger tensor, its gradient has no gaps."""

    def __init__(self, dtype: torch.dtype = torch.float64, step: int = 2) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 10, dtype=dtype)[:, ::step])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.weight * inputs).abs().square()


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in ("with gaps", "complex") for name in ("sgd", "adam", "adamw")] + [("sparse", "sgd")],
)
def test_what_fused_kernels_can_not_do_is_done_in_loops(kind: str, name: str) -> None:
    make = {
        "with gaps": Strided,
        "complex": lambda: Strided(torch.complex128, 1),
        "sparse": lambda: torch.nn.Embedding(5, 3, sparse=True, _weight=torch.ones(5, 3)),
    }[kind]
    inputs = torch.tensor([1, 2, 2]) if kind == "sparse" else torch.arange(1.0, 6 if kind == "with gaps" else 11)
    models = [make(), make()]
    reference = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    config = TrainConfig(optimizer=name, lr=0.001)  # type: ignore[arg-type]
    momentum = {"momentum": config.momentum} if name == "sgd" else {}
    weight_decay = {"weight_decay": 0.0} if name == "adamw" else {}
    optimizers = [reference(models[0].parameters(), lr=0.001, **momentum, **weight_decay), build(config, models[1])]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
    torch.testing.assert_close(models[1].weight, models[0].weight)
    assert not torch.equal(models[1].weight, make().weight), "it has trained"


def test_a_profile(tmp_path: Path) -> None:
    """Of ten steps of each rank; a run that ends before leaves none."""
    trained(tmp_path / "run", "--profile", "--model", "factories:Small", steps=25)
    for rank in (0, 1):
        events = json.loads((tmp_path / f"run/profile/0/rank_000{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in events]
        assert names.count("Optimizer.step#Adam.step") == 10
        assert any("backward" in name.lower() for name in names)
    assert len(list((tmp_path / "run/profile/0").iterdir())) == 2
    trained(tmp_path / "short", "--profile", "--model", "factories:Small", steps=5)
    assert not (tmp_path / "short/profile").exists()


TOUCHED = """
import os, resource, torch
from hvd_ddp.heap import keep_freed_memory
from hvd_ddp.models import ConvNet
torch.set_num_threads(1)
if "KEEP" in os.environ:
    keep_freed_memory()
model, images = ConvNet(10, 3), torch.zeros(72, 3, 32, 32)
for step in range(16):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model(images).sum().backward()
    model.zero_grad()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_that_is_freed_is_not_zeroed_anew() -> None:
    """In six steps of a CNN whose activations have 38 MB, once it has come to rest. Settings of the user's hold."""
    told = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    told["PYTHONPATH"] = str(ROOT)
    faults = [
        int(subprocess.run([sys.executable, "-c", TOUCHED], env=told | more, capture_output=True, check=True).stdout)
        for more in ({}, {"KEEP": "1"}, {"KEEP": "1", "MALLOC_TRIM_THRESHOLD_": "131072"})
    ]
    assert 2 * faults[1] < 100_000 < min(faults[0], faults[2]), faults


ENDED = """
import sys, weakref
from hvd_ddp.main import main
from hvd_ddp.trainer import Trainer

living = []
begin = Trainer.__init__

def begun(self, *arguments, **options):
    begin(self, *arguments, **options)
    living.extend(map(weakref.ref, [self, self.model, self.optimizer, self.data, self.backend]))

Trainer.__init__ = begun
assert main(["train", *sys.argv[1:]]) == 0
print(len(living), [type(one()).__name__ for one in living if one() is not None])
"""


def test_nothing_of_a_training_outlives_it(tmp_path: Path) -> None:
    """Or the rank is at its largest when it exits, and Slurm says that it needs so much."""
    program = [sys.executable, "-c", ENDED, "--model", "factories:Small", "--max-steps", "3", "--threads", "1"]
    result = run(program, cwd=tmp_path, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert result.code == 0 and result.out.splitlines()[-1] == "5 []", result.text
