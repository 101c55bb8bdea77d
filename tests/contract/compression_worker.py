"""What every rank of test_compression.py runs. What came of each gradient goes to files, a rank each."""

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from hvd_ddp import Communication, TrainConfig, Trainer, connect
from hvd_ddp.backends.base import Backend
from hvd_ddp.data.datasets import load
from hvd_ddp.optim import build

SHAPES = {"wide": (60, 50), "tall": (70, 40), "vector": (90,)}
FULL_STEPS = 10  # that PowerSGD averages in full first
STEPS, BROKEN = 60, 20  # of PowerSGD; the step at which rank 1 has a gradient that is no number
OPTIONS = {"epochs": 8, "lr": 0.005, "eval_every": 8}


def gradient(rank: int, name: str, micro: int = 0) -> torch.Tensor:
    """float32; some values whose sum over two ranks is beyond fp16, and some below its normal numbers."""
    values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(1000 * rank + 10 * len(name) + micro))
    values.view(-1)[:3] = torch.tensor([20_000.0 + rank, 1e-6 * (rank + 1), -25_000.0])
    return values


def thin(rank: int, name: str) -> torch.Tensor:
    """Of rank one, where it is a matrix."""
    random = torch.Generator().manual_seed(7 + rank)
    parts = [torch.randn(size, generator=random) for size in SHAPES[name]]
    return torch.outer(*parts) if len(parts) == 2 else parts[0]


class Given(nn.Module):
    """The gradient of its loss is what is given."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterDict({name: torch.zeros(shape) for name, shape in SHAPES.items()})

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((self.parts[name] * gradients[name]).sum() for name in SHAPES)


def averaged(backend: Backend, steps: Iterator[list[dict[str, torch.Tensor]]]) -> list[dict[str, torch.Tensor]]:
    """What the backend makes of each step's gradients, which come in two micro-batches."""
    model = Given()
    wrapped, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), accumulate=2)
    found = []
    for first, second in steps:
        with backend.no_sync(wrapped):
            wrapped(first).backward()
        wrapped(second).backward()
        with backend.synchronize(optimizer):
            found.append({name: parameter.grad.clone() for name, parameter in model.parts.items()})
            optimizer.step()
        optimizer.zero_grad()
    if backend.name == "ddp":
        facts = wrapped._get_ddp_logging_data()
        found[0]["buckets"] = len(facts.get("rebuilt_bucket_sizes", facts["bucket_sizes"]).split(","))
    return found


def given(rank: int, make: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: make(rank, name) for name in SHAPES}


def micros(rank: int) -> list[dict[str, torch.Tensor]]:
    return [{name: gradient(rank, name, micro) for name in SHAPES} for micro in (0, 1)]


def low_rank(rank: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    nothing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(FULL_STEPS + 2):
        yield [nothing, given(rank, thin)]


def constant(rank: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    mine, nothing = given(rank, gradient), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for values in mine.values():
        values.view(-1)[:3] = 0.0
    broken = {name: values * (float("nan") if rank == 1 else 1.0) for name, values in mine.items()}
    for step in range(STEPS):
        yield [nothing, broken if step == BROKEN else mine]


def trained(backend: Backend, folder: Path, **changes: object) -> dict[str, object]:
    config = TrainConfig(run_dir=folder, **{**OPTIONS, **backend.communication.given(), **changes})
    data = load("digits")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return Trainer(config, model, build(config, model), data, backend).fit()


def compressions(out: Path, backend: str, transport: str, forms: list[str]) -> dict[str, object]:
    seen: dict[str, object] = {}
    for form in forms:
        told = {"adasum": True} if form == "adasum" else {"compression": form}
        if form == "powersgd":
            told["bucket_mb"] = 0.01  # several buckets
        communication = Communication(**told)
        with connect(
            backend, transport, "cpu", threads=1, directory=out, timeout=60, communication=communication
        ) as ours:
            rank = ours.launch.rank
            torch.save(averaged(ours, iter([micros(rank)] * 2)), out / f"{form} {rank}.pt")
            if ours.launch.world_size > 2:
                continue
            if form == "powersgd":
                torch.save(averaged(ours, low_rank(rank)), out / f"low rank {rank}.pt")
                torch.save(averaged(ours, constant(rank)), out / f"constant {rank}.pt")
            if form in ("fp16", "powersgd"):
                trained(ours, out / f"{form} straight", max_steps=30)
                for steps in (15, 30):
                    trained(ours, out / f"{form} stopped", max_steps=steps)
            seen[form] = trained(ours, out / f"{form} run")
    return seen


def knobs(out: Path) -> dict[str, object]:
    """What Horovod does with its settings. The environment asks it for two records: see test_compression.py."""
    seen: dict[str, object] = {}
    for name, told in {"plain": {}, "set": {"fusion_mb": 0.0, "cycle_ms": 100.0, "autotune": True}}.items():
        backend = connect("horovod", "mpi", "cpu", threads=1, directory=out, communication=Communication(**told))
        if backend.is_main:  # which writes them
            for record in ("HOROVOD_TIMELINE", "HOROVOD_AUTOTUNE_LOG"):
                Path(os.environ[record]).unlink(missing_ok=True)
        with backend:
            averaged(backend, iter([micros(backend.launch.rank)] * 5))
            seconds = []
            for _ in range(10):
                began = time.perf_counter()
                backend.all_reduce(torch.ones(1))
                seconds.append(time.perf_counter() - began)
        if backend.is_main:
            timeline = Path(os.environ["HOROVOD_TIMELINE"]).read_text()
            seen[name] = {
                "seconds": statistics.median(seconds),
                "buckets": len(set(re.findall(r"hvd_ddp\.gradients\.\d+\.\d+", timeline))),
                "reduced": "ALLREDUCE" in timeline,
                "tuned": Path(os.environ["HOROVOD_AUTOTUNE_LOG"]).exists(),
                "left": [name for name in os.environ if name in ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD")],
            }
    return seen


def main() -> None:
    out, what, *arguments = Path(sys.argv[1]), *sys.argv[2:]
    seen = knobs(out) if what == "knobs" else compressions(out, what, arguments[0], arguments[1:])
    (out / f"seen{os.getpid()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
