"""The short form of chaos.py, which tells more; `-m full` is the long one."""

import subprocess
import sys
from pathlib import Path

import pytest
from launchers import ROOT, environment


def chaos(num_kills: int, folder: Path, *options: str, timeout: float) -> str:
    """What it prints; a process of its own, for it forks."""
    result = subprocess.run(
        [sys.executable, "tests/chaos.py", "--kills", str(num_kills), *options],
        cwd=ROOT, env=environment(TMPDIR=str(folder), OMP_NUM_THREADS="1"), text=True, timeout=timeout,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:]
    return result.stdout


def test_some_kills(tmp_path: Path) -> None:
    assert "12 kills in" in chaos(12, tmp_path, timeout=300)


@pytest.mark.full
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("step_seconds", ["0", "0.2"])
def test_three_hundred_kills(step_seconds: str, tmp_path: Path) -> None:
    print(chaos(300, tmp_path, "--step-seconds", step_seconds, timeout=3600))
