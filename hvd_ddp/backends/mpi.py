"""The launcher's MPI, by way of mpi4py: whether it is there, starting it once, leaving it."""

from __future__ import annotations

import atexit
import warnings
from typing import Any

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch, export

STARTS_NO_MPI = ("torchrun", "horovodrun")  # the second: with --gloo; over MPI its ranks are mpirun's

unfinished: set[object] = set()  # who still holds communicators; MPI.Finalize would wait for their peers


def started_by_ours(launch: Launch) -> bool:
    """Whether the launcher's MPI is of the family that mpi4py (and so Horovod, built beside it) loads."""
    if launch.mpi is None:
        return False
    try:
        return launch.mpi in library()
    except (ImportError, RuntimeError):
        return False


def check(launch: Launch) -> None:
    """Raise HvdDDPError where the launcher gives these ranks no MPI that mpi4py could join."""
    remedy = "Start with mpirun or `srun --mpi=pmix`, or use --transport gloo."
    if launch.launcher in STARTS_NO_MPI:
        raise HvdDDPError(
            f"--transport mpi: `{launch.launcher}` started these ranks, without MPI: each rank would be alone. {remedy}"
        )
    try:
        found = library()
    except (ImportError, RuntimeError) as error:
        raise HvdDDPError(f"--transport mpi: mpi4py finds no MPI here ({error}). Load the site's. {remedy}") from error
    if launch.mpi is not None and launch.mpi not in found:
        raise HvdDDPError(
            f"--transport mpi: mpi4py loads `{_short(found)}`, but {launch.launcher} is of another MPI "
            f"({launch.mpi}): each rank would be alone. Put {launch.launcher}'s MPI on PATH and LD_LIBRARY_PATH, or "
            "use --transport gloo."
        )


def library() -> str:
    """What the MPI that mpi4py loads says of itself; ImportError or RuntimeError where there is none."""
    name: str = mpi4py().Get_library_version()
    return name


def _short(version: str) -> str:
    return version.splitlines()[0].split(",")[0]


def mpi4py() -> Any:
    """mpi4py.MPI, imported without starting MPI."""
    import mpi4py

    mpi4py.rc.initialize = False  # `start` does
    from mpi4py import MPI

    return MPI


def start() -> Any:
    """Start MPI unless it runs already, for threads; returns mpi4py.MPI."""
    # Ranks wait for each other in MPI's own loops, and a thread of the same rank may need the core for computing.
    export({"OMPI_MCA_mpi_yield_when_idle": "1"}, over_the_users=False)
    MPI = mpi4py()
    if not MPI.Is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of another MPI's launcher: the world size shows it, and we say so then
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(_finalize)
    return MPI


def join(launch: Launch) -> Any:
    """Start MPI; raise HvdDDPError where it is not the launcher's, or can't be used by several threads."""
    MPI = start()
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (launch.rank, launch.world_size):
        raise HvdDDPError(
            f"MPI says rank `{world.rank}` of `{world.size}`, but {launch.launcher} started this as rank "
            f"`{launch.rank}` of `{launch.world_size}`: every process would train alone. Under srun give "
            "`--mpi=pmix` (`srun --mpi=list` says what there is), or use --transport gloo."
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise HvdDDPError(
            f"`{_short(library())}` offers no calls from several threads (MPI_THREAD_MULTIPLE), without which "
            "gradients can't move while backward runs. Use an MPI that is built with them, or --transport gloo."
        )
    return MPI


def _finalize() -> None:
    """Leave MPI, unless this process ends in the middle: it must not wait for its peers, the launcher ends the job."""
    if not unfinished:
        mpi4py().Finalize()
