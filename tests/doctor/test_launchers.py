"""doctor on several ranks of this machine, under the real launchers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launchers import Result, assert_none_left, command, run

QUIET = {"OMPI_MCA_mpi_yield_when_idle": "1"}


def checks_of(result: Result) -> list[dict[str, Any]]:
    (line,) = [line for line in result.out.splitlines() if '{"checks"' in line]
    checks: list[dict[str, Any]] = json.loads(line[line.index("{") :])["checks"]
    return checks


@pytest.mark.parametrize(
    ("launcher", "transport"),
    [
        ("mpirun", "mpi"),
        pytest.param("torchrun", "gloo", marks=pytest.mark.full),
        pytest.param("mpiexec.mpich", "gloo", marks=pytest.mark.full),
        pytest.param("horovodrun --gloo", "gloo", marks=pytest.mark.full),
        pytest.param("horovodrun", "mpi", marks=pytest.mark.full),
    ],
)
def test_all_is_well(launcher: str, transport: str, tmp_path: Path) -> None:
    program = ["-m", "hvd_ddp", "doctor", "--json"]
    result = run(command(launcher, 2, program), cwd=tmp_path, timeout=200, OMP_NUM_THREADS="1", **QUIET)
    assert result.code == 0, result.text
    checks = checks_of(result)
    allowed = {"mpi"} if launcher == "mpiexec.mpich" else set()  # mpi4py takes the environment's Open MPI
    assert {check["name"] for check in checks if check["status"] != "ok"} == allowed
    details = {check["name"]: check["detail"] for check in checks}
    assert details["ranks"].startswith("2 on 1 host(s)")
    for backend in ("ddp", "horovod"):
        assert details[f"all_reduce {backend}"].startswith(f"2 ranks over {transport} on cpu")
    assert not list(tmp_path.iterdir())


def test_ranks_in_each_others_way(tmp_path: Path) -> None:
    """On one core, with all threads, and the second without torch: for a person this time."""
    broken = tmp_path / "broken/torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    script = '[ "$OMPI_COMM_WORLD_RANK" = 1 ] && export PYTHONPATH=broken:$PYTHONPATH\nunset OMP_NUM_THREADS\nexec "$@"'
    program = ["bash", "-c", script, "task", sys.executable, "-m", "hvd_ddp", "doctor", "--timeout", "90"]
    mpirun = ["taskset", "--cpu-list", "0", "mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", *program]
    result = run(mpirun, cwd=tmp_path, timeout=150, **QUIET)
    assert result.code == 1, result.text
    said = " ".join(result.out.split())
    assert "failure torch `import torch` fails" in said and "libcudart.so.13: cannot open shared object file" in said
    assert "[rank 1]" in said
    assert "failure versions" not in said, "the installed versions are the same"
    assert "2 ranks of" in said and "have 1 core(s)" in said
    assert "OMP_NUM_THREADS is unset: 2 rank(s)" in said
    assert "warning all_reduce not tried, because of torch" in said
    assert "-> Mend the failures first." in said
    assert said.count("Traceback") == 0
    assert "\x1b" not in result.out
    assert_none_left(str(tmp_path))
