"""Where this rank is: launcher, scheduler, host name, interfaces, ports."""

from __future__ import annotations

import math
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from hvd_ddp.doctor.check import Check, Patient, failure, ok, refused, warning
from hvd_ddp.doctor.probe import NoAnswerError, ask
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.network import LOOPBACK, addresses, interface_of, listen
from hvd_ddp.job.scheduler import end_of_allocation

PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
FEW_PORTS = 1000
SRUN = 10.0  # seconds


def launcher(patient: Patient) -> Iterator[Check]:
    """What started this process, and by which variables that is seen."""
    launch = patient.launch
    by = " under horovodrun" if launch.by_horovodrun and launch.launcher != "horovodrun" else ""
    yield ok("launcher", f"{launch.launcher}{by}, {launch.world_size} rank(s): {_seen(launch.seen)}")


def _seen(text: str) -> str:
    return re.sub(r"^\S+=\d+ (?=\S+=\d+)", "", text)  # without the rank: else every line would be another


def scheduler(patient: Patient) -> Iterator[Check]:
    """The batch system and the end of the allocation; asked by rank 0 alone."""
    launch = patient.launch
    if launch.scheduler is None:
        yield ok("scheduler", "none seen")
        return
    what = f"{launch.scheduler} job {launch.scheduler_job}, {launch.cores} core(s) on this node"
    try:
        ends = end_of_allocation(launch.scheduler, launch.scheduler_job, launch.ends_at)
    except HvdDDPError as error:
        yield warning("scheduler", f"{what}; {error}", "Until then leave --stop-before out.")
        return
    left = "has no time limit" if math.isinf(ends) else f"ends in {max(0.0, ends - time.time()) / 60:.0f} minutes"
    yield ok("scheduler", f"{what}, {left}")


def srun_types(patient: Patient) -> Iterator[Check]:
    """Slurm's --mpi types: Open MPI 5 wants pmix, MPICH and Intel MPI take pmi2 as well."""
    if shutil.which("srun") is None:
        return
    try:
        text = ask(["srun", "--mpi=list"], SRUN)
    except NoAnswerError as error:
        if patient.launch.scheduler == "slurm":  # else it is a package that nobody has set up
            yield warning("srun types", f"`srun --mpi=list` does not answer: {error}", "See `sinfo`: is Slurm up?")
        return
    words = re.findall(r"\w+", text.partition("are...")[2].partition("specific")[0])
    types = [word for word in dict.fromkeys(words) if word != "srun"]  # which some versions put before each line
    if any(name.startswith("pmix") for name in types):
        yield ok("srun types", ", ".join(types))
    else:
        yield warning(
            "srun types",
            f"{', '.join(types) or 'none'}: no pmix, with which srun starts Open MPI",
            "Ask for Slurm's PMIx plugin, or use mpirun in the allocation. DDP, and Horovod over Gloo, need none.",
        )


def host(patient: Patient) -> Iterator[Check]:
    """Whether the host's name leads to an address by which others reach it."""
    name, several = socket.gethostname(), _several_hosts(patient)
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        yield warning(
            "host",
            f"{name} does not resolve ({error.strerror or error})",
            f"Add {name} to /etc/hosts. hvd_ddp goes by interfaces; MPI, Gloo and NCCL in other programs may not.",
        )
        return
    detail = f"{name} is {', '.join(found)}"
    if several and all(address.startswith("127.") or address == "::1" for address in found):
        yield warning(
            "host",
            f"{detail}: loopback, on which no other host reaches it",
            f"Give {name} its real address in /etc/hosts. hvd_ddp goes by interfaces; other programs of MPI, Gloo and "
            "NCCL would meet nobody.",
        )
    else:
        yield ok("host", detail)


def network(patient: Patient) -> Iterator[Check]:
    """Interfaces that can carry the job, and ports that are free on the first of them."""
    try:
        found = addresses(patient.launch.interfaces)
    except HvdDDPError as error:
        if _several_hosts(patient) or patient.launch.interfaces:
            yield refused("interfaces", error)
            return
        yield ok("interfaces", "none but loopback, enough for one host")
        found = [LOOPBACK]
    else:
        wish = patient.launch.interfaces
        by = f", as {wish[0]}={wish[1]} asks for" if wish else ""
        yield ok("interfaces", ", ".join(f"{interface_of(address)} {address}" for address in found) + by)
    yield _ports(found[0])


def _ports(address: str) -> Check:
    try:
        low, high = map(int, PORTS.read_text().split())
    except (OSError, ValueError):
        low, high = 1, 65535
    detail = f"{low} to {high} for listeners"
    remedy = "Widen net.ipv4.ip_local_port_range, or end what holds the ports (ss -tanp)."
    try:
        listen(address).close()
    except OSError as error:
        return failure("ports", f"{detail}, but none is free on {address}: {error.strerror}", remedy)
    if high - low + 1 < FEW_PORTS:
        return warning("ports", f"{detail}: {high - low + 1} in all", remedy)
    return ok("ports", detail)


def _several_hosts(patient: Patient) -> bool:
    return patient.launch.world_size != patient.launch.local_world_size
