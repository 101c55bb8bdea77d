"""What starts ranks for the commands that start trainings: one row a launcher, and running one of them to its end."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from hvd_ddp.backends import mpi
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch, allocation, detect, variables
from hvd_ddp.job.spawn import command as spawned
from hvd_ddp.outside import read

PATIENCE = 10.0  # seconds that ranks have to leave when this process is told to
HANDED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "OMP_NUM_THREADS")  # to ranks on other hosts
LONGEST = 500  # characters of what another program says


class Ended(NamedTuple):
    """How a job ended."""

    code: int
    said: str  # the last words of its stderr that count: one paragraph


def outside(command: str) -> Launch:
    """The place of a process that is to start ranks, in a batch shell perhaps; HvdDDPError for one of several ranks."""
    try:
        launch = detect()
    except HvdDDPError:
        launch = allocation()  # such as the batch shell, which may not train but may start
    if launch.world_size > 1:
        raise HvdDDPError(
            f"{command} starts its own ranks, but {launch.launcher} started `{launch.world_size}` of it: each would "
            f"start as many. Start it once: python -m hvd_ddp {command}."
        )
    return launch


def mpirun() -> tuple[str, str] | None:
    """The mpirun that belongs to the MPI which mpi4py loads, beside this Python or on PATH, and that MPI's family."""
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    try:
        if found is None:
            return None
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
        if "Open MPI" in said and "Open MPI" in mpi.library():
            return found, "Open MPI"
    except (OSError, subprocess.TimeoutExpired, ImportError, RuntimeError):
        pass
    return None


@dataclass(frozen=True)
class Place:
    """Where ranks can be started from here, and by what."""

    start_with: str  # a key of STARTERS
    num_ranks: int  # for which there is room
    ranks_a_node: int  # before another node is used
    cores: int  # of a node, or of the job's part of it
    launcher: str = "torchrun"  # of the ranks, as `Launch` names it
    mpi: str | None = None  # the family of the MPI that starts them
    program: str = ""  # mpirun's path
    options: tuple[str, ...] = ()  # of the launcher

    def command(self, num_ranks: int, arguments: Sequence[str]) -> list[str]:
        """What runs `python -m hvd_ddp <arguments>` on so many ranks."""
        return STARTERS[self.start_with](self, num_ranks, arguments)


def _nproc(place: Place, num_ranks: int, arguments: Sequence[str]) -> list[str]:
    return spawned(num_ranks, "hvd_ddp", arguments)


def _mpirun(place: Place, num_ranks: int, arguments: Sequence[str]) -> list[str]:
    unbound = ["--bind-to", "none"]  # by default all threads of a rank share one core
    return [place.program, "-np", str(num_ranks), *unbound, *place.options, sys.executable, "-m", "hvd_ddp", *arguments]


def _srun(place: Place, num_ranks: int, arguments: Sequence[str]) -> list[str]:
    nodes = -(-num_ranks // place.ranks_a_node)  # as few as can be, each with as many as the others
    size = [f"--nodes={nodes}", f"--ntasks={num_ranks}", f"--ntasks-per-node={-(-num_ranks // nodes)}"]
    return ["srun", *size, *place.options, sys.executable, "-m", "hvd_ddp", *arguments]


STARTERS: dict[str, Callable[[Place, int, Sequence[str]], list[str]]] = {
    "nproc": _nproc,
    "mpirun": _mpirun,
    "srun": _srun,
}


def look(launch: Launch, start_with: str, hostfile: Path | None) -> Place:
    """What to start ranks with: what was asked for, else srun inside a Slurm allocation, else mpirun, else ourselves.

    Raises HvdDDPError where what was asked for is not here.
    """
    mpi = mpirun()
    if start_with == "srun" or (start_with == "auto" and hostfile is None and launch.scheduler == "slurm"):
        return _slurm(launch)
    if start_with == "mpirun" or hostfile is not None or (start_with == "auto" and mpi is not None):
        if mpi is None:
            raise HvdDDPError("mpirun of the MPI that mpi4py loads is not on PATH. Load it, or use --start-with nproc.")
        slots = _slots(hostfile) if hostfile is not None else []
        options = ["--hostfile", str(hostfile)] if slots else [] if launch.scheduler else ["--oversubscribe"]
        if slots:  # ssh hands nothing on
            options += [word for name in variables(*HANDED_ON) for word in ("-x", name)]
        return Place(
            "mpirun", sum(slots) or launch.cores, max(slots, default=launch.cores), launch.cores,
            launcher="openmpi", mpi=mpi[1], program=mpi[0], options=tuple(options),
        )  # fmt: skip
    return Place("nproc", launch.cores, launch.cores, launch.cores)


def _slurm(launch: Launch) -> Place:
    if launch.scheduler != "slurm" or shutil.which("srun") is None:
        raise HvdDDPError("srun starts ranks inside a Slurm allocation, and there is none here. Use sbatch or salloc.")
    found = variables("SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK")
    nodes, cpus = (int(found.get(name, "1")) for name in ("SLURM_JOB_NUM_NODES", "SLURM_CPUS_PER_TASK"))
    tasks = int(found.get("SLURM_NTASKS", str(nodes)))
    # srun takes the processors of a task from its own option alone in some releases (22.05 to 23.02).
    options = ("--kill-on-bad-exit=1", f"--cpus-per-task={cpus}")
    return Place("srun", tasks, -(-tasks // nodes), launch.cores, launcher="srun", options=options)


def _slots(hostfile: Path) -> list[int]:
    """Of each host of Open MPI's hostfile: `name slots=4`, one where it says nothing. Raises HvdDDPError."""
    try:
        lines = [line.partition("#")[0].split() for line in read(hostfile).decode().splitlines()]
        slots = [next((int(w[6:]) for w in words if w.startswith("slots=")), 1) for words in lines if words]
    except (OSError, ValueError) as error:
        raise HvdDDPError(f"--hostfile `{hostfile}` can't be read: {error}. Give lines of `host slots=N`.") from error
    if not slots:
        raise HvdDDPError(f"--hostfile `{hostfile}` names no host. Give lines of `host slots=N`.")
    return slots


def run_to_the_end(command: Sequence[str], log: Path) -> Ended:
    """Run it with its output in `log`; it ends when this process does, by Ctrl-C and TERM too."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with log.with_suffix(".out").open("wb") as out, log.with_suffix(".err").open("w+b") as err:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            try:
                process.wait()
            except BaseException:
                process.terminate()  # launchers hand it on to their ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE)
                process.kill()
                raise
            err.seek(0)
            return Ended(process.returncode, last_words(err.read().decode(errors="replace"), process.returncode))
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def last_words(text: str, code: int) -> str:
    """What hvd_ddp says of a failure; else what is said last, in a block between rules or as a traceback's end."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line.partition("hvd_ddp: ")[2] for line in lines if "hvd_ddp: " in line]
    if ours:
        return ours[-1]
    blocks = [list(block) for told, block in groupby(lines, lambda line: any(map(str.isalnum, line))) if told]
    blocks = [block for block in blocks if "non-zero" not in " ".join(block)] or blocks  # not why, but that it ended
    if not blocks:
        return f"It ended with {code}."
    last = blocks[-1][-1:] if any("Traceback" in line for line in blocks[-1]) else blocks[-1]
    return " ".join(last)[:LONGEST]
