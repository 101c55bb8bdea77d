"""Ranks for what is measured between several: those that a launcher started, or some that we start."""

from __future__ import annotations

import subprocess
import sys

from hvd_ddp.commands.starters import mpirun
from hvd_ddp.job.launch import detect
from hvd_ddp.job.spawn import spawn


def start(nproc: int, arguments: list[str]) -> int | None:
    """Run `python -m hvd_ddp <arguments>` on so many ranks of this machine; their exit code.

    None: this is a rank already, of whatever number a launcher started. The ranks are mpirun's where it belongs to the
    MPI that mpi4py loads, so that MPI can be measured.
    """
    if detect().world_size > 1 or nproc == 1:
        return None
    mpi = mpirun()
    if mpi is None:
        return spawn(nproc, arguments)
    command = [mpi[0], "-np", str(nproc), "--oversubscribe", sys.executable, "-m", "hvd_ddp", *arguments]
    return subprocess.run(command, check=False).returncode
