"""Each check of one process finds its fault: a real one, or a stand-in where the real one takes minutes to build."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from launchers import ROOT, environment

from hvd_ddp.doctor import files, place, probe, software
from hvd_ddp.doctor.check import Check, Patient, examine
from hvd_ddp.job.launch import Launch, detect

OPENMPI: dict[str, str] = json.loads((ROOT / "tests/environments/openmpi.json").read_text())["ranks"][0]
UNDER_OPENMPI = Launch(launcher="openmpi", rank=0, world_size=2, local_world_size=2, mpi="Open MPI")


def patient(launch: Launch | None = None, *, seconds: float = 100, **folders: Path) -> Patient:
    return Patient(launch or Launch(), folders.get("run_dir", Path("runs")), folders.get("data_dir"), seconds)


def named(checks: list[Check], name: str) -> Check:
    (check,) = [check for check in checks if check.name == name]
    return check


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Traceback\nTypeError: no\n", "TypeError: no"),
        (f"tried\n{'-' * 74}\nMPI_ABORT was invoked on rank 1\nwith errorcode 7.\n{'-' * 74}\n",
         "MPI_ABORT was invoked on rank 1 with errorcode 7."),
        (f"{'=' * 74}\nBAD TERMINATION\n{'=' * 74}\nExit string: Killed\n", "Exit string: Killed"),
        (f"{'-' * 74}\n", "it ended with 3"),
        ("", "it ended with 3"),
    ],
    ids=["plain", "framed", "after a frame", "a rule", "nothing"],
)  # fmt: skip
def test_why_a_program_ended_is_what_it_said_last(text: str, reason: str) -> None:
    with pytest.raises(probe.NoAnswerError) as caught:
        probe.ask([sys.executable, "-c", "import sys; sys.stderr.write(sys.argv[1]); sys.exit(3)", text], 20)
    assert str(caught.value) == reason


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Write a module that stands before the real one, here and in children."""

    def write(name: str, text: str, **others: str) -> None:
        folder = tmp_path / "first" / name
        folder.mkdir(parents=True)
        for file, content in {"__init__.py": text, **others}.items():
            (folder / file).write_text(content)
        monkeypatch.syspath_prepend(str(tmp_path / "first"))
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'first'}:{ROOT}")
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


def record(**changes: str) -> dict[str, str]:
    """The record that install-horovod leaves beside a Horovod, and the file that it is in."""
    known = {"key": "0", "torch": "2.13.0", "mpi": "none", "gpu": "none"} | changes
    return {"hvd_ddp_build.json": json.dumps(known)}


@pytest.mark.parametrize(
    ("text", "seconds", "wanted"),
    [
        ("raise ImportError('libc10.so: undefined symbol: _ZN3c10')", 100, "libc10.so: undefined symbol: _ZN3c10"),
        ("import os; os.kill(os.getpid(), 11)", 100, "killed by SIGSEGV"),
        ("import os; os._exit(3)", 100, "it ended with 3"),
        ("import time; time.sleep(1000)", 2, "no answer in 2 s"),
        ("import subprocess; subprocess.run(['sleep', '1000'])", 2, "no answer in 2 s"),
        ("", 100, "No module named 'torch.distributed'"),
    ],
    ids=["raises", "crashes", "leaves", "hangs", "leaves a child", "is another file"],
)
def test_torch_is_broken(text: str, seconds: float, wanted: str, stand_in: Any, tmp_path: Path) -> None:
    """And nothing else is taken for broken because of it."""
    stand_in("torch", text)
    began = time.monotonic()
    checks = list(software.torch_and_horovod(patient(seconds=seconds)))
    assert time.monotonic() - began < seconds + 10
    check = named(checks, "torch")
    assert check.status == "failure" and wanted in check.detail and check.remedy
    assert str(tmp_path / "first/torch/__init__.py") in check.detail, "where it comes from"
    assert named(checks, "horovod").status == "warning"
    assert "can't be tried while torch fails" in named(checks, "horovod").detail


def test_horovod_for_another_torch(stand_in: Any) -> None:
    stand_in("horovod", "", **record())
    check = named(list(software.torch_and_horovod(patient())), "horovod")
    assert check.status == "failure" and "install-horovod" in check.remedy
    import torch

    assert check.detail.startswith(f"built for torch 2.13.0, here is torch {torch.__version__}")


def test_horovod_does_not_load(stand_in: Any) -> None:
    stand_in("horovod", "raise ImportError('mpi_lib_v2.so: undefined symbol: _ZNK2at')")
    check = named(list(software.torch_and_horovod(patient())), "horovod")
    assert check.status == "failure" and "mpi_lib_v2.so: undefined symbol" in check.detail
    assert "install-horovod" in check.remedy


@pytest.mark.parametrize(("launch", "status"), [(UNDER_OPENMPI, "warning"), (Launch(), "ok")], ids=["mpirun", "alone"])
def test_horovod_with_gloo_alone(launch: Launch, status: str, stand_in: Any) -> None:
    torch = "def mpi_built(): return False\ndef gloo_built(): return True\ndef nccl_built(): return 0\n"
    stand_in("horovod", "__version__ = '0.28.1'", **{"torch.py": torch})
    check = named(list(software.torch_and_horovod(patient(launch))), "horovod")
    assert check.status == status and "0.28.1 with gloo" in check.detail
    if status == "warning":
        assert "started by openmpi, but without MPI" in check.detail
        assert "--rebuild where mpicxx of Open MPI is on PATH" in check.remedy


def test_horovod_without_nccl_beside_gpus(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = "def mpi_built(): return True\ndef gloo_built(): return True\ndef nccl_built(): return 0\n"
    stand_in("horovod", "__version__ = '0.28.1'", **{"torch.py": torch})
    seen = patient()

    def devices(patient: Patient, torch: dict[str, Any]) -> Check:
        patient.facts["gpus"] = 4
        return Check("cuda", "ok", "4 GPUs")

    monkeypatch.setattr(software, "_devices", devices)
    check = named(list(software.torch_and_horovod(seen)), "horovod")
    assert check.status == "warning" and "without NCCL" in check.detail and "nvcc" in check.remedy


@pytest.mark.parametrize(("by_horovodrun", "status"), [(False, "warning"), (True, "failure")])
def test_no_horovod(by_horovodrun: bool, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(software.metadata, "version", version)
    monkeypatch.setattr(software, "built_for", lambda: None)
    seen = patient(Launch(by_horovodrun=by_horovodrun))
    check = named(list(software.torch_and_horovod(seen)), "horovod")
    assert check.status == status and "not installed" in check.detail
    assert seen.facts["backends"] == ["ddp"]


def test_another_mpi_than_the_launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """mpi4py of this environment, made to take Debian's MPICH under mpirun of Open MPI."""
    library = tmp_path / "libmpi.so.12"  # its name where MPICH was not packed by Debian
    library.symlink_to("/usr/lib/x86_64-linux-gnu/libmpich.so.12")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("MPI4PY_LIBMPI", str(library))
    (check,) = software.mpi(patient(UNDER_OPENMPI))
    assert check.status == "warning" and check.detail.startswith("MPICH Version:")
    assert "but openmpi is of Open MPI: over this MPI every process would be alone" in check.detail
    (check,) = software.mpi(patient())
    assert check.status == "ok", "alone it is as good as any"


def test_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    (check,) = software.mpi(patient(UNDER_OPENMPI))
    assert check.status == "warning" and "/nowhere/libmpi.so" in check.detail and "MPI module" in check.remedy


@pytest.fixture
def srun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Another srun, first on PATH."""

    def write(script: str) -> None:
        path = tmp_path / "bin/srun"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    return write


@pytest.mark.parametrize(
    ("text", "status", "wanted"),
    [
        ("srun: MPI types are...\nsrun: cray_shasta\nsrun: none\nsrun: pmi2", "warning", "none, pmi2: no pmix"),
        ("MPI plugin types are...\n\tnone\n\tpmix\nspecific pmix plugin versions available: pmix_v4", "ok", "pmix"),
    ],
)
def test_types_of_srun(text: str, status: str, wanted: str, srun: Any) -> None:
    srun(f"printf '{text}'")
    (check,) = place.srun_types(patient())
    assert check.status == status and wanted in check.detail


def test_srun_does_not_answer(srun: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    srun("sleep 1000")
    monkeypatch.setattr(place, "SRUN", 1.0)
    (check,) = place.srun_types(patient(Launch(scheduler="slurm", scheduler_job="7")))
    assert check.status == "warning" and "no answer in 1 s" in check.detail
    assert list(place.srun_types(patient())) == [], "where there is no job, nobody has set Slurm up"


def test_the_scheduler_does_not_answer() -> None:
    (check,) = place.scheduler(patient(Launch(scheduler="lsf", scheduler_job="7")))
    assert check.status == "warning" and "lsf job 7" in check.detail and "--stop-before" in check.remedy


def test_a_check_that_hangs_or_raises_does_not_hold_up_the_others() -> None:
    def hangs(patient: Patient) -> Iterator[Check]:
        time.sleep(1000)
        yield from ()

    def raises(patient: Patient) -> Iterator[Check]:
        raise OSError(5, "Input/output error")

    began = time.monotonic()
    checks = examine(patient(Launch(rank=3, world_size=4), seconds=1), {"a": hangs, "b": raises, "c": place.scheduler})
    assert time.monotonic() - began < 3
    assert [(check.name, check.status, check.rank) for check in checks] == [
        ("a", "failure", 3),
        ("b", "failure", 3),
        ("scheduler", "ok", 3),
    ]
    assert "no answer in 1.5 s" in checks[0].detail and "Input/output error" in checks[1].detail


@pytest.mark.parametrize("what", ["gone", "file"])
def test_data_directory(what: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (check,) = files.data_directory(patient(data_dir=tmp_path / what))
    assert check.status == "failure" and f"{tmp_path / what} can't be read" in check.detail


def in_namespaces(script: str, *options: str, folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """doctor alone, after these shell words in namespaces of its own: the exit code, and what is not ok, by name."""
    command = f"set -e\n{script}\nexec {sys.executable} -m hvd_ddp doctor --json --timeout 60 {' '.join(options)}"
    result = subprocess.run(
        ["unshare", "--mount", "--net", "--uts", "bash", "-c", command],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=200,
    )
    checks = json.loads(result.stdout)["checks"]
    return result.returncode, {check["name"]: check for check in checks if check["status"] != "ok"}


def test_a_machine_on_which_nothing_is_right(tmp_path: Path) -> None:
    """Eight faults at once."""
    for name in ("runs", "data", "first/torch"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "first/torch/__init__.py").write_text("raise ImportError('no')")
    script = (
        "mount -t tmpfs -o ro tmpfs runs\n"
        "mount -t tmpfs -o ro tmpfs data\n"
        "mount -t tmpfs -o size=100k tmpfs /dev/shm\n"
        "hostname nowhere-at-all\n"
        "ip link set lo up\n"
        "echo 40000 40002 > /proc/sys/net/ipv4/ip_local_port_range\n"
        "ulimit -n 200\n"
        "export OMP_NUM_THREADS=1000 PYTHONPATH=first:$PYTHONPATH"
    )
    code, found = in_namespaces(script, "--data-dir", "data", folder=tmp_path)
    assert code == 1
    wanted = {
        "torch": ("failure", "ImportError: no"),
        "horovod": ("warning", "can't be tried while torch fails"),
        "run directory": ("failure", f"{tmp_path}/runs can't be written: Read-only file system (tmpfs)"),
        "data directory": ("warning", "it may not be written, and nothing is packed"),
        "/dev/shm": ("failure", "0 MiB free for 1 rank(s)"),
        "host": ("warning", "nowhere-at-all does not resolve"),
        "ports": ("warning", "40000 to 40002 for listeners: 3 in all"),
        "descriptors": ("failure", "200 open files, up to 200; 1028 are needed"),
        "threads": ("warning", "OMP_NUM_THREADS is 1000"),
        "all_reduce": ("warning", "not tried, because of torch"),
    }
    assert {name: check["status"] for name, check in found.items()} == {name: pair[0] for name, pair in wanted.items()}
    for name, (_, words) in wanted.items():
        assert words in found[name]["detail"], found[name]
        assert found[name]["remedy"], found[name]


def test_all_ports_are_taken_and_the_disk_is_full(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    holder = "import socket, time; held = [socket.create_server(('', port)) for port in (40000, 40001)]; time.sleep(99)"
    script = (
        "ip link set lo up\n"
        "mount -t tmpfs -o size=8k tmpfs runs\n"
        "dd if=/dev/zero of=runs/full bs=8k count=1 status=none\n"
        "echo 40000 40001 > /proc/sys/net/ipv4/ip_local_port_range\n"
        f'{sys.executable} -c "{holder}" & holder=$!\n'
        "sleep 1\n"
        "trap 'kill $holder' EXIT\n"
        f"{sys.executable} -m hvd_ddp doctor --json --timeout 60 || code=$?\n"
        "exit $code\n"
    )
    code, found = in_namespaces(script, folder=tmp_path)
    assert code == 1
    assert found["ports"]["status"] == "failure" and "none is free on 127.0.0.1" in found["ports"]["detail"]
    assert found["run directory"]["status"] == "failure"
    assert "No space left on device (tmpfs)" in found["run directory"]["detail"]


def test_variables_that_contradict_each_other(tmp_path: Path) -> None:
    assert detect(OPENMPI).launcher == "openmpi"
    for env, wanted in (
        ({"RANK": "0", "WORLD_SIZE": "4"}, "WORLD_SIZE is `4`"),
        (OPENMPI | {"RANK": "3"}, "RANK is `3`"),
    ):
        result = subprocess.run(
            [sys.executable, "-m", "hvd_ddp", "doctor", "--json", "--timeout", "60"],
            cwd=tmp_path,
            env=environment(**env),
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert result.returncode == 1
        (check,) = [check for check in json.loads(result.stdout)["checks"] if check["name"] == "launcher"]
        assert check["status"] == "failure" and wanted in check["detail"] and "Unset RANK" in check["remedy"]
