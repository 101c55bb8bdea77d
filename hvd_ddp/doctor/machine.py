"""This machine's limits: processors, threads, shared memory, descriptors."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from hvd_ddp.doctor.check import Check, Patient, failure, ok, warning
from hvd_ddp.job.launch import variables

SHM = Path("/dev/shm")
FEW = 1024  # descriptors, as most shells allow


def processors(patient: Patient) -> Iterator[Check]:
    """Which cores this process may use. How ranks share them, `together` judges."""
    cores = sorted(os.sched_getaffinity(0))
    patient.facts |= {"cores": cores, "cores_of_node": patient.launch.cores, "machine_cores": os.cpu_count() or 1}
    patient.facts["OMP_NUM_THREADS"] = variables("OMP_NUM_THREADS").get("OMP_NUM_THREADS", "")
    patient.facts["load"] = os.getloadavg()[0]
    return iter(())


def shared_memory(patient: Patient) -> Iterator[Check]:
    """/dev/shm, over which MPI, NCCL and loader processes of one machine talk. `together` judges its size."""
    if not SHM.is_dir() or not os.access(SHM, os.W_OK):
        yield failure("/dev/shm", "there is none that may be written", "Mount a tmpfs there (containers: --shm-size).")
        return
    patient.facts["shm"] = shutil.disk_usage(SHM).free


def descriptors(patient: Patient) -> Iterator[Check]:
    """Open files: rank 0 holds four a rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * patient.launch.world_size + FEW if patient.launch.rank == 0 else FEW
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    detail = f"{soft} open files, up to {most}"
    if hard == resource.RLIM_INFINITY or hard >= needed:
        yield ok("descriptors", detail)
    else:
        say = failure if hard < needed / 2 else warning
        yield say("descriptors", f"{detail}; {needed} are needed", f"Raise it: ulimit -Hn {needed}, or limits.conf.")


def locked_memory(patient: Patient) -> Iterator[Check]:
    """InfiniBand pins its buffers; a batch system that was started with small limits hands them on."""
    if not Path("/sys/class/infiniband").is_dir() or not any(Path("/sys/class/infiniband").iterdir()):
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield ok("locked memory", "unlimited, as InfiniBand wants")
    else:
        remedy = "Set `ulimit -l unlimited` where the batch system starts its daemons (LimitMEMLOCK=infinity)."
        yield warning("locked memory", f"{soft / 1024:g} KiB, too few for InfiniBand", remedy)
