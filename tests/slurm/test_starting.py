"""On two hosts under Slurm: ranks that start alone, late, or never."""

import re
import sys
import time
from pathlib import Path

import pytest
from cluster.slurm import Cluster
from launchers import ROOT
from rundir import summary
from two_nodes import SLACK, ends, nothing_left, submit

PATHS = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
TRAIN = f"{sys.executable} -m hvd_ddp train --threads 1 --run-dir run --max-steps 12 --model factories:Small"


@pytest.mark.parametrize("size", ["-N2", "-n2"])
def test_without_srun_the_batch_shell_is_refused(two: Cluster, size: str, tmp_path: Path) -> None:
    job = two.sbatch(f"SECONDS=0; {TRAIN}; code=$?; echo took $SECONDS s; exit $code", size, cwd=tmp_path, **PATHS)
    assert ends(job, 30) == "FAILED", job.log
    assert job.exit_code == 2
    assert job.log.count("srun") == 1, job.log
    assert "Start it with `srun python -m hvd_ddp ...`" in job.log
    assert "Traceback" not in job.log
    found = re.search(r"took (\d+) s", job.log)
    assert found
    assert int(found[1]) <= 5
    assert not (tmp_path / "run").exists()


def test_without_srun_in_salloc_one_process_trains_and_says_so(two: Cluster, tmp_path: Path) -> None:
    result = two.run("salloc", "-N2", *TRAIN.split(), cwd=tmp_path, timeout=60, **PATHS)
    assert result.code == 0, result.text
    assert "1 rank(s)" in result.text
    assert "of 2 nodes: only this process trains; start with srun to use them" in result.text
    assert summary(tmp_path / "run")["world_size"] == 1
    assert summary(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_never_comes_is_named(two: Cluster, missing: int, tmp_path: Path) -> None:
    """Its task sleeps instead."""
    tasks = f"[[ $SLURM_PROCID == {missing} ]] && exec sleep 1000; exec {TRAIN} --start-timeout 8"
    script = f"SECONDS=0; srun --kill-on-bad-exit=1 bash -c '{tasks}'; code=$?; echo took $SECONDS s; exit $code"
    job = two.sbatch(script, "-N2", "--ntasks-per-node=1", cwd=tmp_path, **PATHS)
    assert ends(job, 60) == "FAILED", job.log
    said = [line for line in job.log.splitlines() if line.startswith("hvd_ddp: ")]
    assert len(said) == 1
    if missing == 0:
        assert "Rank 0 (node1) was not found before --start-timeout (this is rank 1 on node2)" in said[0]
    else:
        assert "Of 2 ranks 1 did not come before --start-timeout: 1 (node2)." in said[0]
    assert "Exited with exit code 1" in job.log  # the sleeping one is killed, which srun's own code shows
    found = re.search(r"took (\d+) s", job.log)
    assert found
    assert 8 <= int(found[1]) <= 8 + 10 + SLACK
    nothing_left(two)
    assert not list(tmp_path.glob("**/.rendezvous*"))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_preparing_for_longer_than_the_timeout_is_no_fault(two: Cluster, backend: str, tmp_path: Path) -> None:
    """Rank 0 takes nine seconds."""
    job = submit(two, tmp_path, "--backend", backend, "--model", "factories:SlowToBuild", "--max-steps", "12",
                 "--timeout", "5")  # fmt: skip
    assert ends(job, 90) == "COMPLETED", job.log
    assert summary(tmp_path / "run")["status"] == "finished"
    assert "hvd_ddp: " not in job.log


@pytest.mark.full
@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_is_awaited(two: Cluster, late: int, tmp_path: Path) -> None:
    """By 40 s, for longer than --timeout."""
    tasks = f"[[ $SLURM_PROCID == {late} ]] && sleep 40; exec {TRAIN} --timeout 8"
    began = time.monotonic()
    job = two.sbatch(f"srun bash -c '{tasks}'", "-N2", "--ntasks-per-node=1", cwd=tmp_path, **PATHS)
    assert ends(job, 120) == "COMPLETED", job.log
    assert time.monotonic() - began > 40
    assert summary(tmp_path / "run")["status"] == "finished"
