"""Submit a template on a cluster of the tests, and read what its run left behind."""

from pathlib import Path

import torch
from cluster.jobs import Job
from cluster.slurm import Cluster
from launchers import ROOT
from rundir import last_step, newest, tensors

TEMPLATES = ROOT / "slurm"
HERE = Path(__file__).resolve().parent
# Four ranks on two cores crawl when Open MPI waits by spinning.
QUIET = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{HERE}", "OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}


def submit(
    cluster: Cluster, template: str | Path, options: str, *train: str, cwd: Path | None = None, **env: str
) -> Job:
    """`sbatch OPTIONS slurm/TEMPLATE TRAIN`, one thread a rank, by default in the cluster's folder."""
    script = TEMPLATES / template
    command = ["sbatch", "--parsable", *options.split(), str(script), "--threads", "1", *train]
    result = cluster.run(*command, cwd=cwd, **(QUIET | env))
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
    """Of the newest checkpoint, by name."""
    return tensors(newest(run))


def at_step(job: Job, run: Path, step: int) -> None:
    """Wait until the run has come to that step."""
    job.until(lambda: last_step(run) >= step, f"come to step {step}", 120)
