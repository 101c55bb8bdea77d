"""Start programs under the real launchers, with hard time limits: a hang is a failure."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hvd_ddp.job.launch import Launch, detect

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def clear_what_killed_mpiruns_left(folder: Path) -> None:
    """An mpirun (Open MPI 5) whose process number a killed one had does not start: it finds that one's files there.

    "The PMIx server's listener thread failed to start", exit code 213 (openpmix, issue 4022).
    """
    for left in folder.glob("ompi.*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            number = left.name.removeprefix("ompi.")
            if left.stat().st_uid == os.getuid() and number.isdigit() and not Path(f"/proc/{number}").exists():
                shutil.rmtree(left, ignore_errors=True)


def environment(**extra: str) -> dict[str, str]:
    """The environment of the tests, without what an outer launcher may have left, with this Python first on PATH."""
    clear_what_killed_mpiruns_left(Path(tempfile.gettempdir()))
    foreign = ("SLURM_", "OMPI_", "PMI", "HOROVOD_", "TORCHELASTIC_", "HVD_DDP_", "HYDI_", "MPI_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "_"):
        env.pop(name, None)
    env |= {
        "PATH": f"{BIN}{os.pathsep}{env['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return env | extra


def run(command: list[str], *, timeout: float = 120, cwd: Path | None = None, **extra: str) -> Result:
    """Run to the end, or kill the whole process group and fail."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s: {command}\n{out[-4000:]}\n{err[-4000:]}") from None
    return Result(process.returncode, out, err)


def processes(mark: str) -> dict[int, Launch]:
    """Living processes that were started with `mark` in their environment or on their command line, and who they are.

    A launcher is a rank of no job: its launch is `single`.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # not a process, or gone meanwhile
            continue
        if line and (mark in line or any(mark in word for word in words)) and int(entry.name) != os.getpid():
            rank = "hvd_ddp" in line.split("\0") and "torchrun" not in line
            found[int(entry.name)] = detect(dict(word.split("=", 1) for word in words if "=" in word) if rank else {})
    return found


def assert_none_left(mark: str, *, within: float = 3.0) -> None:
    """No process of a job outlives it; the last ones may still be on their way out."""
    deadline = time.monotonic() + within
    while left := processes(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def command(launcher: str, num_ranks: int, program: list[str]) -> list[str]:
    """`program` (arguments of python) on so many ranks under that launcher."""
    python = [sys.executable, *program]
    n = str(num_ranks)
    match launcher:
        case "python":
            assert num_ranks == 1
            return python
        case "torchrun":
            module = program[1:] if program[0] == "-m" else program
            kind = ["-m"] if program[0] == "-m" else []
            return [str(BIN / "torchrun"), "--nproc-per-node", n, *kind, *module]
        case "mpirun":
            return [str(BIN / "mpirun"), "-np", n, "--oversubscribe", *python]
        case "mpiexec.mpich":
            return ["mpiexec.mpich", "-n", n, *python]
        case "horovodrun --gloo":
            return [str(BIN / "horovodrun"), "--gloo", "-np", n, "-H", f"localhost:{n}", *python]
        case "horovodrun":
            return [str(BIN / "horovodrun"), "-np", n, *python]
        case "--nproc":
            return [*python, "--nproc", n]
    raise ValueError(launcher)


def train(launcher: str, num_ranks: int, *options: str, timeout: float = 120, cwd: Path | None = None) -> Result:
    """`python -m hvd_ddp train` under that launcher, one thread a rank."""
    program = ["-m", "hvd_ddp", "train", "--threads", "1", *options]
    return run(command(launcher, num_ranks, program), timeout=timeout, cwd=cwd)
