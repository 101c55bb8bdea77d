"""Build Horovod's wheel, without touching the user's environment, and keep it for the next time."""

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.horovod_build import source as horovod
from hvd_ddp.horovod_build.record import RECORD
from hvd_ddp.horovod_build.target import Gpu, Target

# What setup.py imports or names in setup_requires. setuptools 80 no longer runs such a setup.py.
BUILD_TOOLS = ["setuptools<80", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml", "cffi"]
PIP_LIMIT = 900.0  # seconds; a slow network, not a dead one: pip gives up on that by itself
BUILD_LIMIT = 3600.0  # 3 to 8 minutes on 2 cores
TIMED_OUT = 124
CAN_NOT_RUN = 127


def run_bounded(command: list[str], log: Path, *, seconds: float, env: dict[str, str]) -> int:
    """Run a command with its output added to `log`; return its exit code, TIMED_OUT or CAN_NOT_RUN.

    It gets a process group of its own, which is ended (TERM, then KILL) when the time is over or we are interrupted.
    """
    with log.open("ab") as stream:
        stream.write(f"$ {shlex.join(command)}\n".encode())
        stream.flush()
        try:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
            )
        except OSError as error:
            stream.write(f"{error}\n".encode())
            return CAN_NOT_RUN
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads its own group, and all of the group, unless it has ended by itself."""
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        if process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def last_lines(log: Path, number: int = 15) -> str:
    """Return the end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-number:]) if log.is_file() else ""


def first_error(log: Path) -> str:
    """Return the first line of a log that looks like the cause (CMake goes on for two more), else its last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()] if log.is_file() else []
    pattern = re.compile(r"\berror\b[: ]|CMake Error|No space left|Killed", re.IGNORECASE)
    at = next((number for number, line in enumerate(lines) if pattern.search(line)), len(lines) - 1)
    return " ".join(lines[at : at + 3])[:300] if lines else ""


@contextmanager
def only_one(cache: Path, say: Callable[[str], None], *, seconds: float = 3600.0) -> Iterator[None]:
    """Let one install-horovod of this user work at a time: a second one waits, and then finds the wheel.

    File systems without locks do without: wheels are renamed into place whole, so that two builders only waste time.
    """
    with (cache / "lock").open("w") as handle:
        deadline, told = time.monotonic() + seconds, False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HvdDDPError(
                        f"Another install-horovod has held `{handle.name}` for over {seconds / 60:.0f} minutes. Two at "
                        f"once would build the same twice. End that one, or use another --cache-dir."
                    ) from None
                if not told:
                    say(f"Another install-horovod is at work (lock {handle.name}); waiting for it.")
                told = True
                time.sleep(1.0)
            except OSError:
                break
        yield


def cached_wheel(folder: Path) -> Path | None:
    """Return the wheel in the folder of its key, if it was built before."""
    return next(iter(sorted(folder.glob("horovod-*.whl"))), None)


def can_compile(command: list[str], source: str) -> str:
    """Return an empty string if the compiler takes `source`, else its first complaint."""
    try:
        done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]


def check_compiler(target: Target) -> None:
    """Find out in a second what would otherwise end the build after minutes."""
    found = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None or shutil.which(shlex.split(found)[0]) is None or shutil.which("make") is None:
        raise HvdDDPError(
            f"The C++ compiler `{found or 'c++'}` or `make` is not on PATH. Horovod has no ready wheel and must be "
            f"compiled. Install both (Debian: apt install build-essential; a cluster: module load gcc), or build on a "
            f"login node that has them and shares the cache folder."
        )
    standard = f"-std=c++{horovod.cxx_standard(target.torch.version)}"
    compiler = [*shlex.split(found), standard, "-fsyntax-only", "-x", "c++", "-"]
    complaint = can_compile(compiler, "int main() {}\n")
    if complaint:
        raise HvdDDPError(
            f"The C++ compiler `{found}` does not take `{standard}` ({complaint}). The headers of torch "
            f"{target.torch.version} need it. Use a newer one (gcc 11 or later): set CXX, or module load gcc."
        )
    check_headers(target, compiler)


def check_headers(target: Target, compiler: list[str]) -> None:
    """Compile a line with Python's header and one with MPI's. `compiler` reads standard input and writes nothing."""
    include = sysconfig.get_path("include")
    complaint = can_compile([*compiler, f"-I{include}"], "#include <Python.h>\n")
    if complaint:
        raise HvdDDPError(
            f"Python's header Python.h does not compile from `{include}` ({complaint}). Horovod's library is a Python "
            f"extension and can't be built without it. Install Python's development files (Debian: apt install "
            f"python3-dev), or use a Python that has them (pyenv, conda)."
        )
    if target.mpi:
        complaint = can_compile([target.mpi.mpicxx, "-fsyntax-only", "-x", "c++", "-"], "#include <mpi.h>\n")
        if complaint:
            raise HvdDDPError(
                f"`{target.mpi.mpicxx}` can't compile a file that includes mpi.h ({complaint}). Horovod can't be built "
                f"with this MPI. Install its development files (Debian: apt install libopenmpi-dev; or load the whole "
                f"MPI module), or take it off PATH to build with Gloo alone."
            )


def pip(*arguments: str) -> list[str]:
    """Return the command line of this environment's pip."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def run_pip(command: list[str], log: Path, *, what: str, remedy: str, env: dict[str, str]) -> None:
    """Run pip to fetch something; HvdDDPError with `remedy` if it can't."""
    if run_bounded(command, log, seconds=PIP_LIMIT, env=env) != 0:
        cause = next((line for line in last_lines(log).splitlines() if line.startswith("ERROR")), first_error(log))
        raise HvdDDPError(f"pip could not get {what} ({cause}; log: {log}). Horovod can't be built. {remedy}.")


def private_tools(folder: Path, log: Path) -> dict[str, str]:
    """Install the build tools into `folder` only, and return the environment in which the build sees them."""
    wanted = list(BUILD_TOOLS)
    system_cmake = usable_cmake()
    if system_cmake is None:
        wanted.append("cmake>=3.18,<4")
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    env["PIP_USER"] = "0"  # it can not be combined with --target
    run_pip(
        pip("install", "--quiet", "--target", str(folder), *wanted),
        log,
        what=f"the build tools ({', '.join(wanted)})",
        remedy="Connect to a package index, or set PIP_FIND_LINKS to a folder that holds their wheels",
        env=env,
    )
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH")]))
    env["HOROVOD_CMAKE"] = system_cmake or str(folder / "cmake" / "data" / "bin" / "cmake")
    return env


def usable_cmake() -> str | None:
    """Return the CMake on PATH if Horovod's old files go with it: CMake 4 refuses them."""
    cmake = shutil.which("cmake")
    try:
        shown = subprocess.run([cmake or "cmake", "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"version (\d+)\.(\d+)", shown)
    return cmake if found and (3, 18) <= (int(found[1]), int(found[2])) < (4, 0) else None


def fetch_sdist(cache: Path, log: Path, *, env: dict[str, str]) -> Path:
    """Return Horovod's source distribution from the cache, or download it there."""
    sdist = cache / "sdist" / horovod.SDIST
    if not sdist.is_file():
        sdist.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=sdist.parent) as folder:
            # pip runs the source's setup.py for its metadata: with our tools, not with the newest from the index.
            only_this = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
            run_pip(
                pip("download", *only_this, "--dest", folder, f"horovod=={horovod.HOROVOD}"),
                log,
                what=f"the source of Horovod {horovod.HOROVOD}",
                remedy=f"Connect to a package index, or bring {horovod.SDIST} here (on another machine: `pip "
                f"download --no-deps --no-binary horovod horovod=={horovod.HOROVOD}`) and give it with --sdist",
                env=env,
            )
            os.replace(Path(folder) / horovod.SDIST, sdist)
    return sdist


def build_variables(target: Target, env: dict[str, str]) -> dict[str, str]:
    """Return `env` with the switches of Horovod's build: PyTorch only, Gloo always, MPI and NCCL if there."""
    switches = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if target.mpi else "HOROVOD_WITHOUT_MPI": "1",
        "MAKEFLAGS": f"-j{min(8, len(os.sched_getaffinity(0)))}",  # a file takes up to 2 GB of memory
    }
    if target.gpu is None:
        switches["HOROVOD_WITHOUT_NVTX"] = "1"
    if target.mpi:
        binaries = Path(target.mpi.mpicxx).parent
        switches.update(PATH=f"{binaries}{os.pathsep}{env.get('PATH', os.defpath)}", MPI_HOME=str(binaries.parent))
    return env | switches


def gpu_variables(gpu: Gpu, folder: Path) -> dict[str, str]:
    """Return the switches of an NCCL build, and link NCCL's library under the name that the linker looks for.

    pip's NCCL has a libnccl.so.2 and no libnccl.so. `folder` stays in the wheel's search path for libraries: it must
    not be one in a shared /tmp that others could make again.

    The wheel was built with CUDA 13 and loaded where this was written, but never run on a GPU: that machine has none.
    """
    folder.mkdir(exist_ok=True)
    link = folder / "libnccl.so"
    link.unlink(missing_ok=True)
    link.symlink_to(gpu.nccl / "lib" / "libnccl.so.2")
    return {
        "HOROVOD_GPU": "CUDA",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": str(gpu.toolkit),
        "CUDA_HOME": str(gpu.toolkit),  # torch's list of libraries, which Horovod's CMake asks for, is made from it
        "HOROVOD_BUILD_CUDA_CC_LIST": gpu.capabilities,
        "HOROVOD_NCCL_INCLUDE": str(gpu.nccl / "include"),
        "HOROVOD_NCCL_LIB": str(folder),
        "HOROVOD_NCCL_LINK": "SHARED",
    }


def build_wheel(target: Target, cache: Path, *, log: Path, sdist: Path | None) -> Path:
    """Build the wheel for `target` into its folder of the cache, in one rename at the end, and return its path."""
    check_compiler(target)
    shelf = cache / "wheels" / target.record["key"]
    with tempfile.TemporaryDirectory(prefix="hvd_ddp-horovod-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        env = private_tools(work / "tools", log)
        source = horovod.unpack(sdist or fetch_sdist(cache, log, env=env), work)
        for mend in horovod.mends(target.torch.version):
            horovod.apply(mend, source)
        (source / "horovod" / RECORD).write_text(json.dumps(target.record, indent=1) + "\n")
        env = build_variables(target, env) | (gpu_variables(target.gpu, shelf / "nccl") if target.gpu else {})
        command = pip("wheel", "--no-build-isolation", "--no-deps", "--use-pep517", "--verbose")
        code = run_bounded([*command, "--wheel-dir", str(work), str(source)], log, seconds=BUILD_LIMIT, env=env)
        built = cached_wheel(work)
        if code != 0 or built is None:
            limit = f" after {BUILD_LIMIT / 60:.0f} minutes" if code == TIMED_OUT else ""
            raise HvdDDPError(
                f"The build of Horovod {horovod.HOROVOD} for torch {target.torch.version} ended with exit code "
                f"{code}{limit}: `{first_error(log)}`. Nothing was installed. The whole log is {log}; mend what "
                f"it names, or train with --backend ddp, which needs no build."
            )
        return keep(built, shelf)


def keep(built: Path, shelf: Path) -> Path:
    """Copy a wheel to its shelf and rename it into place, so that nobody ever finds half a wheel."""
    handle, name = tempfile.mkstemp(dir=shelf, suffix=".part")
    os.close(handle)
    shutil.copyfile(built, name)
    os.replace(name, shelf / built.name)
    return shelf / built.name
