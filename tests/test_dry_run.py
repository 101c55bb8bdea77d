"""--dry-run: what the training would refuse is refused, what it would take is told, and nothing is written."""

import re
from pathlib import Path

import pytest
from launchers import ROOT, Result, command, run


def dry_run(launcher: str, folder: Path, *options: str) -> Result:
    program = ["-m", "hvd_ddp", "train", "--dry-run", "--threads", "1", *options]
    return run(command(launcher, 2, program), cwd=folder, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")


@pytest.mark.parametrize(("launcher", "backend"), [("--nproc", "ddp"), ("mpirun", "horovod")])
def test_what_it_tells(launcher: str, backend: str, tmp_path: Path) -> None:
    """The checkpoint has 300,010 parameters and two moments of each, in float32."""
    result = dry_run(launcher, tmp_path, "--backend", backend, "--model", "factories:Wide", "--max-steps", "7000")
    assert result.code == 0, result.text[-3000:]
    for line in (
        "dry run: 2 steps done, nothing written; the training would begin at step 0",
        "7000 steps take ",
        "a checkpoint: 3.6 MB; 3 and the best one are kept",
        f"backend {backend}",
    ):
        assert line in result.out
    assert float(re.search(r"at most ([\d,]+) MB a rank", result.out)[1].replace(",", "")) > 100
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_training_would_refuse(tmp_path: Path) -> None:
    small = ["--model", "factories:Small", "--run-dir", "run", "--max-steps"]
    program = ["-m", "hvd_ddp", "train", "--threads", "1", *small, "5"]
    paths = f"{ROOT}:{ROOT / 'tests'}"
    assert run(command("--nproc", 2, program), cwd=tmp_path, PYTHONPATH=paths).code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = dry_run("--nproc", tmp_path, *small, "4")
    assert result.code != 0 and "dry run" not in result.out and "Traceback" not in result.err, result.text
    result = dry_run("--nproc", tmp_path, *small, "9")
    assert result.code == 0 and "would go on from" in result.out, result.text
    result = dry_run("--nproc", tmp_path, *small, "5")
    assert result.code == 0 and "already finished" in result.out and "dry run" not in result.out, result.text
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
