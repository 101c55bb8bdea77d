"""Horovod's source distribution, and the mends that it needs to build and run today.

Horovod 0.28.1 (June 2023) is its last release. Each row of `mends` is one replacement in one file: what, and why.
A row whose text is not there is an error, never a silent no-op: then the source is not the one that was tested.
"""

import hashlib
import tarfile
import zlib
from pathlib import Path
from typing import NamedTuple

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.horovod_build.record import RECORD

HOROVOD = "0.28.1"
SDIST = f"horovod-{HOROVOD}.tar.gz"

MPI_RUN = "horovod/runner/mpi_run.py"
TORCH_CMAKE = "horovod/torch/CMakeLists.txt"
FIND_PYTORCH = "cmake/Modules/FindPytorch.cmake"
CUDA_CMAKE = "horovod/common/ops/cuda/CMakeLists.txt"
GLOO_CONTEXT = "horovod/common/gloo/gloo_context.cc"
GLOO_TYPES = "third_party/gloo/gloo/types.h"

MPIRUN_OF_THE_ENVIRONMENT = '''\
def _mpirun():
    """The mpirun of a virtual environment also when that is not activated: another MPI's starts ranks of size 1."""
    beside = os.path.join(os.path.dirname(sys.executable), 'mpirun')
    return quote(beside) if sys.prefix != sys.base_prefix and os.access(beside, os.X_OK) else 'mpirun'


def mpi_available('''


class Mend(NamedTuple):
    """Replace `old` by `new` in `file`, where it must stand exactly once."""

    file: str
    why: str
    old: str
    new: str


def cxx_standard(torch_version: str) -> int:
    """Return the C++ standard that torch's own headers ask for: 17 from torch 2.1 up to 2.9, 20 from 2.10 on."""
    major, minor = torch_version.split(".")[:2]
    return 17 if (int(major), int(minor)) < (2, 10) else 20


def build_mends(standard: int) -> list[Mend]:
    """Mends of the build: C++ standard, no CUDA unless asked for, newer compilers and Pythons, the record."""
    cxx = f"set(CMAKE_CXX_STANDARD {standard})"
    upper = 'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n'
    no_cuda = f"{upper}if(NOT DEFINED ENV{{HOROVOD_GPU_OPERATIONS}})\n    set(Pytorch_CUDA FALSE)\nendif()\n"
    distutils = "from distutils.sysconfig import get_python_inc; print(get_python_inc())"
    include = "import sysconfig; print(sysconfig.get_path('include'))"
    iostream = "#include <iostream>\n"
    packages = "packages=find_packages(),"
    record = f"{packages}\n      package_data={{'horovod': ['{RECORD}']}},"
    return [
        Mend("CMakeLists.txt", "torch's headers need a newer C++", "set(CMAKE_CXX_STANDARD 14)", cxx),
        Mend(TORCH_CMAKE, "torch's headers need a newer C++", "set(CMAKE_CXX_STANDARD 14)", cxx),
        Mend(FIND_PYTORCH, "a CUDA torch with nvcc on PATH turns a CPU build into a CUDA build", upper, no_cuda),
        Mend(CUDA_CMAKE, "nvcc 13 has no C++11", "set(CMAKE_CUDA_STANDARD 11)", "set(CMAKE_CUDA_STANDARD 17)"),
        Mend(TORCH_CMAKE, "Python 3.12 has no distutils", distutils, include),
        # https://github.com/pytorch/pytorch/issues/153933
        Mend(GLOO_TYPES, "gcc 15 declares uint8_t no more by chance", iostream, f"#include <cstdint>\n{iostream}"),
        Mend("setup.py", "the wheel carries what it was built for", packages, record),
    ]


def network_mends() -> list[Mend]:
    """Mend of the interface: each process set, the one of all ranks too, makes a Gloo device of its own.

    It forgets HOROVOD_GLOO_IFACE, and Gloo then takes the address of the host's own name: 127.0.1.1 as Debian sets it
    up ("connect [127.0.1.1]: Connection refused", measured on two hosts), or some other network's.
    """
    device = "device_attr.ai_family = AF_UNSPEC;\n  auto dev = CreateDevice(device_attr);\n\n"
    same = f"device_attr.iface = gloo_iface_ = global_context.gloo_iface_;\n  {device}"
    return [Mend(GLOO_CONTEXT, "process sets forget the interface", device, same)]


def launcher_mends() -> list[Mend]:
    """Mends of horovodrun: options that Open MPI 4 and 5 and MPICH read alike, the right mpirun, a marker for ranks.

    Open MPI 5 wants two dashes. It stops on `-bind-to none`, and takes no notice of `-mca plm_rsh_args` (measured with
    5.0.11: the ssh port and identity file are lost without a word).
    """
    marker = "    impi_or_mpich = mpi in (_IMPI_IMPL, _MPICH_IMPL)\n"
    exported = f"{marker}    env = dict(env or {{}}, HVD_DDP_LAUNCHER='horovodrun')\n"
    hydra = ("elif 'MPICH' in output:", "elif 'MPICH' in output or 'HYDRA' in output:")
    find, which = "from distutils.spawn import find_executable", "from shutil import which as find_executable"
    rows = [
        ("['-mca pml ob1', '-mca btl ^openib']", "['--mca pml ob1', '--mca btl ^openib']"),
        ("['-bind-to none', '-map-by slot']", "['--bind-to none', '--map-by slot']"),
        ("else f'-mca plm_rsh_args", "else f'--mca plm_rsh_args"),
        ("'-mca btl_tcp_if_include {nics}'", "'--mca btl_tcp_if_include {nics}'"),
        ("'-mca plm_rsh_no_tree_spawn true'", "'--mca plm_rsh_no_tree_spawn true'"),
        ("'-mca plm_rsh_num_concurrent {}'", "'--mca plm_rsh_num_concurrent {}'"),
    ]
    dashes = [Mend(MPI_RUN, "Open MPI 5 wants two dashes", old, new) for old, new in rows]
    return [
        *dashes,
        Mend(MPI_RUN, "mpirun of MPICH 4 calls itself HYDRA, not MPICH", *hydra),
        Mend(MPI_RUN, "a rank can't see horovodrun otherwise", marker, exported),
        Mend(MPI_RUN, "the environment's own mpirun", "def mpi_available(", MPIRUN_OF_THE_ENVIRONMENT),
        Mend(MPI_RUN, "the environment's own mpirun", "= 'mpirun --version'", "= _mpirun() + ' --version'"),
        Mend(MPI_RUN, "the environment's own mpirun", "'mpirun {basic_args} '", "'{mpirun} {basic_args} '"),
        Mend(MPI_RUN, "the environment's own mpirun", ".format(basic_args=", ".format(mpirun=_mpirun(), basic_args="),
        Mend("horovod/runner/js_run.py", "Python 3.12 has no distutils", find, which),
    ]


def mends(torch_version: str) -> list[Mend]:
    """Return all mends for this torch, in the order in which they are applied."""
    return build_mends(cxx_standard(torch_version)) + network_mends() + launcher_mends()


def fingerprint(torch_version: str) -> str:
    """Return a short hash of all mends: another mend means another wheel."""
    return hashlib.sha256(repr([tuple(mend) for mend in mends(torch_version)]).encode()).hexdigest()[:12]


def apply(mend: Mend, source: Path) -> None:
    """Apply one mend to the unpacked `source`; HvdDDPError if its text is not there exactly once."""
    path = source / mend.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(mend.old) != 1:
        raise HvdDDPError(
            f"`{mend.file}` of Horovod's source holds `{' '.join(mend.old.split())}` "
            f"{text.count(mend.old)} times, not once: it is not the source of Horovod {HOROVOD} as it was published. "
            f"It can't be mended ({mend.why}) and would not build or run. Give {SDIST} as published with --sdist, or "
            "leave --sdist out to download it."
        )
    path.write_text(text.replace(mend.old, mend.new), encoding="utf-8")


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack `sdist` into `folder` (nothing lands outside of it) and return the folder of the source."""
    if not hasattr(tarfile, "data_filter"):
        raise HvdDDPError(
            "This Python's `tarfile` can't refuse paths that lead out of the folder (it has no data filter), so that "
            "Horovod's source is not unpacked. Use Python 3.10.12, 3.11.4, 3.12 or newer."
        )
    try:
        with tarfile.open(sdist, "r:gz") as archive:
            archive.extractall(folder, filter="data")
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise HvdDDPError(
            f"`{sdist}` can't be unpacked ({error}). Without the source Horovod can't be built. Give the file "
            f"{SDIST} as it was published with --sdist, or leave --sdist out to download it."
        ) from error
    source = folder / SDIST.removesuffix(".tar.gz")
    if not (source / "setup.py").is_file():
        raise HvdDDPError(
            f"`{sdist}` holds no folder `{source.name}` with a setup.py. It is not the source distribution of Horovod "
            f"{HOROVOD}, and the mends are written for no other. Give {SDIST} with --sdist, or leave --sdist out."
        )
    return source
