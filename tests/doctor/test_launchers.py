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


def stand_in(folder: Path, built: str, init: str) -> Path:
    """A Horovod with one of its parts, in a folder to be put on PYTHONPATH."""
    package = folder / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.28.1'\n")
    parts = "".join(f"def {name}_built():\n    return {name == built}\n" for name in ("mpi", "gloo", "nccl"))
    (package / "torch.py").write_text(f"{parts}def init():\n    {init}\n")
    return folder


def test_ranks_in_each_others_way(tmp_path: Path) -> None:
    """On one core, with all threads, a Horovod without MPI, and the second without torch: for a person this time."""
    broken = tmp_path / "broken/torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    gloo = stand_in(tmp_path / "gloo", "gloo", "raise AssertionError")
    script = (
        f"export PYTHONPATH={gloo}:$PYTHONPATH\n"
        '[ "$OMPI_COMM_WORLD_RANK" = 1 ] && export PYTHONPATH=broken:$PYTHONPATH\nunset OMP_NUM_THREADS\nexec "$@"'
    )
    program = ["bash", "-c", script, "task", sys.executable, "-m", "hvd_ddp", "doctor", "--timeout", "90"]
    mpirun = ["taskset", "--cpu-list", "0", "mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", *program]
    result = run(mpirun, cwd=tmp_path, timeout=150, **QUIET)
    assert result.code == 1, result.text
    said = " ".join(result.out.split())
    assert "failure torch `import torch` fails" in said and "libcudart.so.13: cannot open shared object file" in said
    assert "[rank 1]" in said
    assert "started by openmpi, but without MPI: it goes over Gloo, which is slower [rank 0]" in said
    assert "--rebuild where mpicxx of Open MPI is on PATH" in said
    assert "failure versions" not in said, "the installed versions are the same"
    assert "2 ranks of" in said and "have 1 core(s)" in said
    assert "OMP_NUM_THREADS is unset: 2 rank(s)" in said
    assert "warning all_reduce not tried, because of torch" in said
    assert "-> Mend the failures first." in said
    assert said.count("Traceback") == 0
    assert "\x1b" not in result.out
    assert_none_left(str(tmp_path))


@pytest.mark.parametrize("json_wanted", [True, pytest.param(False, marks=pytest.mark.full)], ids=["program", "person"])
def test_mpi_ends_the_job_in_the_last_check(json_wanted: bool, tmp_path: Path) -> None:
    """All that was found is said all the same, and what was tried then."""
    aborts = stand_in(tmp_path / "aborts", "mpi", "from mpi4py import MPI; MPI.COMM_WORLD.Abort(7)")
    script = f'export PYTHONPATH={aborts}:$PYTHONPATH\nexec "$@"'
    doctor = [sys.executable, "-m", "hvd_ddp", "doctor", "--timeout", "60", *(["--json"] if json_wanted else [])]
    result = run(
        ["mpirun", "-np", "2", "--oversubscribe", "bash", "-c", script, "task", *doctor],
        cwd=tmp_path, timeout=150, OMP_NUM_THREADS="1", **QUIET,
    )  # fmt: skip
    assert result.code != 0
    if json_wanted:
        checks = checks_of(result)
        bad = [(check["name"], check["status"]) for check in checks if check["status"] != "ok"]
        assert bad == [("all_reduce horovod", "failure")]
        said = checks[-1]["detail"]  # whichever comes first: the word of the launcher, or that of what was tried
        assert "the launcher ended the job while this was tried" in said or "MPI_ABORT was invoked" in said, said
        assert checks[-1]["remedy"]
        assert {"ranks", "torch", "mpi", "all_reduce ddp"} <= {check["name"] for check in checks}
    else:
        assert "failure  all_reduce horovod  the launcher ended the job" in result.out
        assert result.out.splitlines()[-1].endswith("ok, 1 failures"), result.out
    assert_none_left(str(tmp_path))


TWICE = """
import os, signal, sys
from pathlib import Path
from hvd_ddp.commands import doctor
from hvd_ddp.doctor.check import Patient
from hvd_ddp.job.launch import Launch

class Terminal:
    flush = sys.__stdout__.flush
    def write(self, text):
        sys.__stdout__.write(text)
        os.kill(os.getpid(), signal.SIGTERM)

sys.stdout = Terminal()
told = doctor.Options(json=True), Patient(Launch("mpirun"), Path("runs"), None, 9.0), [], ["node1"]
signal.signal(signal.SIGTERM, lambda *_: doctor._cut_short(*told))
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_told_twice_to_end_it_says_all_once(tmp_path: Path) -> None:
    result = run([sys.executable, "-c", TWICE], cwd=tmp_path, timeout=60)
    assert result.code == 1 and len(checks_of(result)) == 1, result.text
