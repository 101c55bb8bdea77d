"""How gradients move. A new backend is one file and one line of BACKENDS."""

from __future__ import annotations

import contextlib
import logging
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from hvd_ddp.backends import mpi
from hvd_ddp.config import PLAIN, BackendName, Communication, DeviceName, TransportName
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.heap import keep_freed_memory
from hvd_ddp.job.launch import Launch, detect
from hvd_ddp.job.rendezvous import meet

if TYPE_CHECKING:
    import torch

    from hvd_ddp.backends.base import Backend

BACKENDS = {
    "local": "hvd_ddp.backends.local:LocalBackend",
    "ddp": "hvd_ddp.backends.ddp:DDPBackend",
    "horovod": "hvd_ddp.backends.horovod:HorovodBackend",
}
log = logging.getLogger(__name__)


def auto(launch: Launch) -> tuple[str, str]:
    """The backend that `auto` stands for, and why."""
    if launch.by_horovodrun:
        return "horovod", "horovodrun started it"
    if launch.world_size > 1:
        return "ddp", f"{launch.launcher} started {launch.world_size} ranks"
    return "local", "one process"


def connect(
    backend: BackendName = "auto",
    transport: TransportName = "auto",
    device: DeviceName = "auto",
    *,
    threads: Literal["auto"] | int = "auto",
    directory: Path = Path("runs"),
    start_timeout: float = 300.0,
    timeout: float = 300.0,
    communication: Communication = PLAIN,
) -> Backend:
    """Meet the other ranks of this job and return a backend to be used as `with connect() as backend:`.

    `directory` is where ranks that have no other way leave a short-lived file to find each other; `start_timeout` and
    `timeout` are seconds; `communication` is how gradients move. Sets torch's number of threads and, on CPUs, how
    malloc keeps memory. Raises HvdDDPError, the same on every rank.
    """
    import torch

    launch = detect()
    chosen, why = auto(launch) if backend == "auto" else (backend, "asked for")
    error = None
    try:
        cls = _load(chosen)
        where = _device(device, launch)
        carrier = cls.choose_transport(transport, launch, where)
        cls.check(communication, carrier, launch, where)
    except HvdDDPError as problem:
        error = str(problem)
    meeting = meet(launch, directory=directory, start_timeout=start_timeout, error=error)
    torch.set_num_threads(meeting.cores if threads == "auto" else threads)
    if where.type == "cpu":
        keep_freed_memory()
    result = cls(meeting, transport=carrier, device=where, timeout=timeout, communication=communication)
    result.why, result.asked_for = why, backend != "auto"
    return result


def all_here(first: Backend) -> list[Backend]:
    """A backend for each way that works in this job, for comparisons: to be set up one at a time.

    `first` is one of the job's, set up: the ranks agree over it.
    """
    mine = [[name, transport] for name in BACKENDS for transport in _transports(name, first)]
    theirs = first.all_gather_object(mine)
    return [another(first, name, transport) for name, transport in mine if all([name, transport] in w for w in theirs)]


def another(first: Backend, name: str, transport: str) -> Backend:
    """A backend of the same job as `first`, to be set up when that is not; HvdDDPError where it can't work.

    It moves gradients in the same way.
    """
    cls = _load(name)
    carrier = cls.choose_transport(transport, first.launch, first.device)
    cls.check(first.communication, carrier, first.launch, first.device)
    return cls(
        first.meeting,
        transport=carrier,
        device=first.device,
        timeout=first.timeout,
        communication=first.communication,
    )


def why_not(name: str, transport: str, device: DeviceName, launch: Launch) -> str | None:
    """Why this backend can't use this transport in such a job; None where it can, as far as this process sees."""
    try:
        _load(name).choose_transport(transport, launch, _device(device, launch))
    except HvdDDPError as error:
        return str(error)
    return None


def _transports(name: str, first: Backend) -> list[str]:
    """Those of this backend that work here; only the one that `auto` stands for where a process can't change it."""
    cls, found = _load(name), list[str]()
    for transport in get_args(TransportName)[1:] if cls.changes_transport else ["auto"]:
        if transport == "mpi" and not mpi.started_by_ours(first.launch):
            continue  # may work, but can't be tried: without its launcher some MPIs end the process
        with contextlib.suppress(HvdDDPError):
            carrier = cls.choose_transport(transport, first.launch, first.device)
            cls.check(first.communication, carrier, first.launch, first.device)
            found.append(carrier)
    return found


def _load(name: str) -> type[Backend]:
    if name not in BACKENDS:
        raise HvdDDPError(f"--backend is `{name}`, which is none of: {', '.join(BACKENDS)}.")
    module, _, attribute = BACKENDS[name].partition(":")
    cls: type[Backend] = getattr(import_module(module), attribute)
    return cls


def _device(name: str, launch: Launch) -> torch.device:
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise HvdDDPError("--device is `cuda`, but torch sees no GPU here. Use --device cpu, or ask for GPUs.")
    if count == 1:  # where the scheduler shows each rank its own GPU alone, it is number 0 for all
        return torch.device("cuda", 0)
    if launch.local_rank >= count:
        raise HvdDDPError(
            f"Rank {launch.rank} is number {launch.local_rank} on its node, but torch sees `{count}` GPUs there: two "
            "ranks would share one. Start at most as many ranks a node as it has GPUs."
        )
    return torch.device("cuda", launch.local_rank)
