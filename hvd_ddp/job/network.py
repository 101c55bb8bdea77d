"""This host's addresses and interfaces, and sockets bound to them alone."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hvd_ddp.errors import HvdDDPError

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT = timedelta(seconds=60)


def listen(address: str) -> socket.socket:
    """A listener on a free port of this address only."""
    return socket.create_server((address, 0), backlog=4096)


def serve_store(address: str) -> tuple[Store, int]:
    """A store in this process on a socket of ours, and its port: left alone, TCPStore listens on every interface."""
    from torch.distributed import TCPStore  # late: doctor asks for addresses where torch is broken

    listener = listen(address)
    port = int(listener.getsockname()[1])
    descriptor = listener.detach()  # the store closes it
    return TCPStore(address, port, None, True, STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=descriptor), port


def store_client(host: str, port: int) -> Store:
    """A connection to the store that `serve_store` made."""
    from torch.distributed import TCPStore

    return TCPStore(host, port, None, False, STORE_TIMEOUT, wait_for_workers=False)


def addresses(wanted: tuple[str, str] | None = None) -> list[str]:
    """This host's IPv4 addresses that others may reach: of interfaces that are up, without loopback.

    `wanted` is the variable in which the user names interfaces, and its value (NCCL's syntax: see `_matches`); only
    those count then. The likeliest come first: of interfaces named in full, then of those with the default route, then
    in the system's order; link-local ones (169.254.*), which reach no further than one wire, last.
    Raises HvdDDPError where no address is left.
    """
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    reachable = [
        (name, str(entry.address))
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    found = [(name, address) for name, address in reachable if wanted is None or _matches(name, wanted[1])]
    if not found:
        raise HvdDDPError(_no_address(reachable, wanted))
    named = wanted[1].removeprefix("=").split(",") if wanted else []
    default = _default_routes()
    found.sort(key=lambda pair: (pair[1].startswith("169.254."), pair[0] not in named, pair[0] not in default))
    return [address for _, address in found]


def _matches(name: str, wanted: str) -> bool:
    """Whether the interface `name` is one of NCCL_SOCKET_IFNAME's.

    A list of prefixes with commas; `=` before the list: whole names; `^` before that: all interfaces but these.
    docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, and `ncclOsFindInterfaces` where that says nothing: both
    signs stand once, before the list; empty words are skipped; a list without words matches everything.
    """
    words = [word for word in wanted.removeprefix("^").removeprefix("=").split(",") if word]
    exact = wanted.removeprefix("^").startswith("=")
    matches = not words or any(name == word if exact else name.startswith(word) for word in words)
    return matches != wanted.startswith("^")


def _default_routes() -> set[str]:
    """Interfaces over which a default route leads; empty where the kernel does not tell."""
    try:
        lines = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        return set()
    return {fields[0] for fields in lines if fields[1:2] == ["00000000"]}


def _no_address(reachable: list[tuple[str, str]], wanted: tuple[str, str] | None) -> str:
    host = socket.gethostname()
    if not reachable:
        return (
            f"`{host}` has no address but loopback, and the job has ranks on other hosts. "
            "Bring up the interface between the nodes."
        )
    assert wanted is not None, "without a wish all that is reachable is found"
    there = ", ".join(f"{name} ({address})" for name, address in reachable)
    return (
        f"{wanted[0]} is `{wanted[1]}`, which names no interface of `{host}` that is up and has an IPv4 address other "
        f"than loopback: its ranks could not be reached. There are: {there}. Set it to one of these, or unset it."
    )


def source_address(host: str, port: int) -> str:
    """This host's address on the route to `host`. No packet is sent.

    Raises HvdDDPError where no route leads there.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # of a datagram socket: only chooses the route
        except OSError as error:
            raise HvdDDPError(
                f"`{socket.gethostname()}` has no way to `{host}` ({error.strerror or error}): this rank can't take "
                "part. Bring up the interface between the nodes, or see how its name resolves."
            ) from error
        return str(probe.getsockname()[0])


def has_link(interface: str) -> bool:
    """Whether this interface is up and has a carrier: without one it is this host that is cut off from the others."""
    stats = psutil.net_if_stats().get(interface)
    return stats is not None and bool(stats.isup)


def interface_of(address: str) -> str:
    """The interface that has this address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    raise HvdDDPError(f"No interface of `{socket.gethostname()}` has the address `{address}` any more. Start again.")
