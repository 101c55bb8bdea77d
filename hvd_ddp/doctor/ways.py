"""Whether every host reaches every other on the network that the job uses: each knocks at each other's door."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from hvd_ddp.doctor.check import Check, failure, ok
from hvd_ddp.doctor.gathering import Answers, Gathering
from hvd_ddp.job.network import listen

PATIENCE, AT_ONCE = 5.0, 64  # seconds for one connection; connections that one host tries at a time
SHOWN = 8  # pairs that are named


class Door:
    """A listener that says its name to whoever comes: on another host the same address may be something else."""

    def __init__(self, address: str) -> None:
        self.name = secrets.token_hex(8)
        self._socket = listen(address)
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="door", daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                visitor, _ = self._socket.accept()
                with visitor, suppress(OSError):
                    visitor.sendall(self.name.encode())


def open_door(address: str) -> list[Any]:
    """Port and name of this host's door, or why there is none."""
    try:
        door = Door(address)
    except OSError as error:
        return [0, f"{error.strerror or error}"]
    return [door.port, door.name]


def knock(doors: list[list[Any]]) -> dict[str, Any]:
    """Try all doors [host, address, port, name]: seconds of those that opened, reasons of the others, by host."""
    return asyncio.run(_knock(doors))


async def _knock(doors: list[list[Any]]) -> dict[str, Any]:
    turn, found = asyncio.Semaphore(AT_ONCE), dict[str, Any]()

    async def one(host: str, address: str, port: int, name: str) -> None:
        async with turn:
            began = time.monotonic()
            try:
                said = await asyncio.wait_for(_visit(address, port), PATIENCE)
                found[host] = time.monotonic() - began if said == name else "another program answers there"
            except asyncio.TimeoutError:
                found[host] = "no answer: packets are dropped"
            except OSError as error:
                found[host] = error.strerror or str(error)

    await asyncio.gather(*(one(*door) for door in doors))
    return found


async def _visit(address: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(address, port, family=socket.AF_INET)
    try:
        return (await reader.read(64)).decode(errors="replace")
    finally:
        writer.close()


def ways(gathering: Gathering, answers: Answers, seconds: float) -> list[Check]:
    """On rank 0: all ordered pairs of hosts."""
    first = {host: ranks[0] for host, ranks in gathering.hosts.items()}
    if len(first) < 2:
        return []
    addresses = {host: gathering.peers[rank].address for host, rank in first.items()}
    places = {str(rank): addresses[host] for host, rank in first.items()}
    told = gathering.ask("door", places, list(first.values()), answers, seconds)
    opened = {host: told.get(rank, [0, "no answer"]) for host, rank in first.items()}
    doors = [[host, addresses[host], port, name] for host, (port, name) in opened.items() if port]
    wait = PATIENCE * (2 + len(doors) / AT_ONCE)
    told = gathering.ask("knock", doors, list(first.values()), answers, seconds + wait)
    bad = [f"{host} at {addresses[host]}: {name}" for host, (port, name) in opened.items() if not port]
    times = []
    for host, rank in first.items():
        for other, result in told.get(rank, {}).items():
            if isinstance(result, str):
                bad.append(f"{host} to {other} at {addresses[other]}: {result}")
            else:
                times.append(result)
    if bad:
        more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        return [
            failure(
                "ways between hosts",
                "; ".join(bad[:SHOWN]) + more,
                "Open all TCP ports between the nodes, or name the interface that connects them: NCCL_SOCKET_IFNAME.",
            )
        ]
    return [ok("ways between hosts", f"all {len(first)} reach each other, in {max(times, default=0) * 1000:.1f} ms")]
