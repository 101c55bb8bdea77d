"""Ranks for what is measured between several: those that a launcher started, or some that we start."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from hvd_ddp.backends import mpi
from hvd_ddp.job.launch import detect
from hvd_ddp.job.spawn import spawn


def start(nproc: int, arguments: list[str]) -> int | None:
    """Run `python -m hvd_ddp <arguments>` on so many ranks of this machine; their exit code.

    None: this is a rank already, of whatever number a launcher started. The ranks are mpirun's where it belongs to the
    MPI that mpi4py loads, so that MPI can be measured.
    """
    if detect().world_size > 1 or nproc == 1:
        return None
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if mpirun is None or not _is_open_mpi(mpirun):
        return spawn(nproc, arguments)
    command = [mpirun, "-np", str(nproc), "--oversubscribe", sys.executable, "-m", "hvd_ddp", *arguments]
    return subprocess.run(command, check=False).returncode


def _is_open_mpi(mpirun: str) -> bool:
    try:
        said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
        return "Open MPI" in said and "Open MPI" in mpi.library()
    except (OSError, subprocess.TimeoutExpired, ImportError, RuntimeError):
        return False
