"""Submit a template on a cluster of the tests, and read what its run left behind."""

import json
from pathlib import Path
from typing import Any

import torch
from cluster.jobs import Job
from cluster.slurm import Cluster
from launchers import ROOT

TEMPLATES = ROOT / "slurm"
HERE = Path(__file__).resolve().parent
# Four ranks on two cores crawl when Open MPI waits by spinning.
QUIET = {"PYTHONPATH": f"{ROOT}:{HERE}", "OMPI_MCA_mpi_yield_when_idle": "1"}


def submit(cluster: Cluster, template: str | Path, options: str, *train: str, **env: str) -> Job:
    """`sbatch OPTIONS slurm/TEMPLATE TRAIN`, one thread a rank, in the cluster's folder."""
    script = TEMPLATES / template
    command = ["sbatch", "--parsable", *options.split(), str(script), "--threads", "1", *train]
    result = cluster.run(*command, **(QUIET | env))
    assert result.code == 0, result.text
    return Job(cluster, result.out.strip())


def edited(template: str, folder: Path, *changes: tuple[str, str]) -> Path:
    """A copy of a template in another folder, as a user changes it; each `old` must be there."""
    text = (TEMPLATES / template).read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    copy = folder / template
    copy.write_text(text)
    return copy


def completed(job: Job, timeout: float) -> str:
    """Wait for the end, which must be good; the log."""
    assert job.wait(timeout) == "COMPLETED", f"{job.info()}\n{job.log[-6000:]}"
    assert job.exit_code == 0
    return job.log


def state(run: Path) -> dict[str, torch.Tensor]:
    """Parameters, buffers and the optimizer's state of the newest checkpoint, by name."""
    found = torch.load(sorted((run / "checkpoints").glob("step_*.pt"))[-1], weights_only=True)
    tensors = {f"model.{name}": value for name, value in found["model"].items()}
    for index, entry in found["optimizer"]["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in entry.items()}
    return {"step": torch.tensor(found["progress"]["step"]), **tensors}


def different(mine: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that differ in a bit."""
    assert mine.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(mine[name], wanted[name])]


def distance(mine: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest norm(a - b) / norm(b) of a tensor."""
    assert mine.keys() == wanted.keys()
    pairs = [(mine[name].double(), wanted[name].double()) for name in wanted]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-300)) for a, b in pairs)


def rows(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of these kinds."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] in kinds]


def summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found


def last_step(run: Path) -> int:
    """Of the lines of metrics.jsonl so far; 0 before there is one."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return max([json.loads(line).get("step", 0) for line in lines if line.endswith("}")], default=0)


def at_step(job: Job, run: Path, step: int) -> None:
    """Wait until the run has come to that step."""
    job.until(lambda: last_step(run) >= step, f"come to step {step}", 120)
