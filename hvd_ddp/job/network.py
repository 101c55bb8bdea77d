"""This host's addresses and interfaces, and sockets bound to them alone."""

from __future__ import annotations

import socket
from datetime import timedelta

import psutil
from torch.distributed import Store, TCPStore

from hvd_ddp.errors import HvdDDPError

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT = timedelta(seconds=60)


def listen(address: str) -> socket.socket:
    """A listener on a free port of this address only."""
    return socket.create_server((address, 0), backlog=4096)


def serve_store(address: str) -> tuple[Store, int]:
    """A store in this process on a socket of ours, and its port: left alone, TCPStore listens on every interface."""
    listener = listen(address)
    port = int(listener.getsockname()[1])
    descriptor = listener.detach()  # the store closes it
    return TCPStore(address, port, None, True, STORE_TIMEOUT, wait_for_workers=False, master_listen_fd=descriptor), port


def store_client(host: str, port: int) -> Store:
    """A connection to the store that `serve_store` made."""
    return TCPStore(host, port, None, False, STORE_TIMEOUT, wait_for_workers=False)


def addresses() -> list[str]:
    """This host's IPv4 addresses that others may reach: of interfaces that are up, without loopback."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = [
        str(entry.address)
        for name, entries in psutil.net_if_addrs().items()
        if name in up
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    if not found:
        raise HvdDDPError(
            f"`{socket.gethostname()}` has no address but loopback, and the job has ranks on other hosts. "
            "Bring up the interface between the nodes."
        )
    return found


def interface_of(address: str) -> str:
    """The interface that has this address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    raise HvdDDPError(f"No interface of `{socket.gethostname()}` has the address `{address}` any more. Start again.")
