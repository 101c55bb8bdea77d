"""Where do we meet: every rank shows the job's token to rank 0, which names who is missing and gives out the store.

Rank 0 listens on a free port. Its card (addresses, port, token) travels over the launcher's channel. A peer proves
that it knows the token (HMAC-SHA256 over a nonce of the server and its message), says who it is, and waits. When all
have come, rank 0 answers each with the facts of all ranks and the address of a key-value store that lives on a socket
bound to the interface over which the peers came.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ddp.errors import HvdDDPError, RankFailedError, RankZeroMissingError
from hvd_ddp.job.channels import Channel, channel_for, read_card, write_card
from hvd_ddp.job.launch import Launch
from hvd_ddp.job.network import LOOPBACK, addresses, interface_of, listen, serve_store, store_client

if TYPE_CHECKING:
    from torch.distributed import Store

NONCE, MAC, LENGTH = 16, 32, 4  # bytes
GREETING = NONCE + MAC
LARGEST_HELLO, LARGEST_ANSWER = 1 << 14, 1 << 22  # bytes
LAST_WORDS = 30.0  # seconds that a job which can't train waits for ranks that are still to come, to tell them
HANDSHAKE = 10.0  # seconds in which a peer that has connected must have shown the token


@dataclass(frozen=True)
class Meeting:
    """The job as every rank knows it after the rendezvous."""

    launch: Launch  # complete: no field is None
    store: Store
    store_address: tuple[str, int]  # where other threads may have a client of their own
    address: str  # of this rank on the network that the job uses
    interface: str
    cores: int  # that each rank of this node may use
    farewells: list[Callable[[], None]] = field(default_factory=list)  # done when the job ends early, on each rank


def meet(launch: Launch, *, directory: Path, start_timeout: float, error: str | None = None) -> Meeting:
    """Meet the other ranks of the job.

    `error` is what this rank found wrong before it came: then all ranks raise it as HvdDDPError. Raises
    RankFailedError with the ranks that are missing after `start_timeout` seconds.
    """
    hello: dict[str, Any] = {
        "rank": launch.rank,
        "world_size": launch.world_size,
        "host": socket.gethostname(),
        "node_rank": launch.node_rank,
        "cores": launch.cores,
        "error": error,
    }
    if launch.world_size == 1:
        if error:
            raise HvdDDPError(error)
        from torch.distributed import HashStore

        return _meeting(launch, [hello], store=HashStore(), store_address=("", 0), address=LOOPBACK)
    channel = channel_for(launch, directory)
    deadline = time.monotonic() + start_timeout
    if launch.rank == 0:
        return _host(launch, channel, hello=hello, deadline=deadline)
    return _join(launch, channel, hello=hello, deadline=deadline)


def _meeting(
    launch: Launch, peers: list[dict[str, Any]], *, store: Store, store_address: tuple[str, int], address: str
) -> Meeting:
    hosts = tuple(str(peer["host"]) for peer in peers)
    here = [rank for rank, host in enumerate(hosts) if host == hosts[launch.rank]]
    nodes = list(dict.fromkeys(hosts))
    launch = replace(
        launch,
        hosts=hosts,
        local_world_size=len(here),
        node_rank=nodes.index(hosts[launch.rank]) if launch.node_rank is None else launch.node_rank,
    )
    cores = min(int(peers[rank]["cores"]) for rank in here)
    return Meeting(launch, store, store_address, address, interface_of(address), max(1, cores // len(here)))


def _host(launch: Launch, channel: Channel, *, hello: dict[str, Any], deadline: float) -> Meeting:
    token = secrets.token_bytes(32)
    guests = _Guests(token, launch.world_size)
    guests.hellos[0] = hello
    alone = launch.local_world_size == launch.world_size
    listeners = [listen(address) for address in ([LOOPBACK] if alone else addresses())]
    doors = [listener.getsockname()[:2] for listener in listeners]
    channel.offer(write_card(doors, token))
    try:
        missing = asyncio.run(guests.receive(listeners, deadline))
        channel.withdraw()
        peers = [guests.hellos.get(rank, {}) for rank in range(launch.world_size)]
        problem = _problem([*peers, *guests.misfits], missing, launch)
        if problem:
            guests.answer({"error": problem[0], "failed": problem[1]})
            raise (RankFailedError if problem[1] else HvdDDPError)(problem[0])
        address = guests.address()
        store, port = serve_store(address)
        guests.answer({"peers": peers, "store": [address, port]})
        return _meeting(launch, peers, store=store, store_address=(address, port), address=address)
    finally:
        guests.close()


def _problem(hellos: list[dict[str, Any]], missing: list[int], launch: Launch) -> tuple[str, bool] | None:
    """What is wrong, and whether that is a rank's failure rather than something the user set."""
    came = [hello for hello in hellos if hello]
    for hello in came:
        if hello.get("error"):
            everywhere = all(other.get("error") == hello["error"] for other in came)
            return str(hello["error"]) + ("" if everywhere else f" (rank {hello['rank']} on {hello['host']})"), False
    for hello in came:
        if hello["world_size"] != launch.world_size:
            return (
                f"rank {hello['rank']} was told a world size of `{hello['world_size']}`, rank 0 of "
                f"`{launch.world_size}`: they are not of one job. Start all ranks with one command."
            ), False
    if missing:
        names = ", ".join(f"{rank} ({launch.hosts[rank]})" if launch.hosts else str(rank) for rank in missing[:20])
        more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        return (
            f"Of {launch.world_size} ranks {len(missing)} did not come before --start-timeout: {names}{more}. "
            "See why they did not start (their logs, their nodes), or give a longer --start-timeout."
        ), True
    return None


class _Guests:
    """Rank 0's side of the handshake: the peers that have shown the token, and their open connections."""

    def __init__(self, token: bytes, world_size: int) -> None:
        self.hellos: dict[int, dict[str, Any]] = {}
        self.misfits: list[dict[str, Any]] = []  # of ranks that this job does not have
        self._token, self._world_size = token, world_size
        self._connections: list[tuple[socket.socket, bytes]] = []

    async def receive(self, listeners: list[socket.socket], deadline: float) -> list[int]:
        """Wait for all peers; returns the ranks that have not come by the deadline.

        Once it is clear that the job can't train, those that are still to come get LAST_WORDS seconds to hear it.
        """
        servers = [asyncio.ensure_future(self._accept(listener)) for listener in listeners]
        try:
            unwell = False
            while len(self.hellos) < self._world_size and time.monotonic() < deadline:
                if not unwell and (self.misfits or any(hello.get("error") for hello in self.hellos.values())):
                    unwell, deadline = True, min(deadline, time.monotonic() + LAST_WORDS)
                await asyncio.sleep(0.02)
        finally:
            for server in servers:
                server.cancel()
            await asyncio.gather(*servers, return_exceptions=True)
            for listener in listeners:
                listener.close()
        return [rank for rank in range(self._world_size) if rank not in self.hellos]

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Future[None]] = set()
        listener.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # too many open files: strangers are shown out after HANDSHAKE seconds
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            task = asyncio.ensure_future(self._greet(connection))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _greet(self, connection: socket.socket) -> None:
        nonce = secrets.token_bytes(NONCE)
        try:
            hello = json.loads(await asyncio.wait_for(self._hello(connection, nonce), HANDSHAKE))
            rank, fits = int(hello["rank"]), hello["world_size"] == self._world_size
            if rank < 1 or rank in self.hellos or (fits and rank >= self._world_size):
                raise ValueError(f"rank {rank} is not awaited")
        except (OSError, ValueError, KeyError, TypeError, asyncio.TimeoutError, EOFError):
            connection.close()  # a stranger, or a peer that will try again
            return
        self._connections.append((connection, nonce))
        if rank < self._world_size:
            self.hellos[rank] = hello
        else:
            self.misfits.append(hello)

    async def _hello(self, connection: socket.socket, nonce: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, nonce + _seal(self._token, nonce, b"rank 0", b""))
        head = await _receive_exactly(connection, MAC + LENGTH)
        (size,) = struct.unpack("!I", head[MAC:])
        if size > LARGEST_HELLO:
            raise ValueError("too long")
        body = await _receive_exactly(connection, size)
        if not hmac.compare_digest(head[:MAC], _seal(self._token, nonce, b"hello", body)):
            raise ValueError("wrong token")
        return body

    def address(self) -> str:
        """This host's address over which most peers came."""
        came = [connection.getsockname()[0] for connection, _ in self._connections]
        return str(max(set(came), key=came.count))

    def answer(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        for connection, nonce in self._connections:
            connection.setblocking(True)
            connection.settimeout(HANDSHAKE)
            try:
                connection.sendall(_seal(self._token, nonce, b"answer", body) + struct.pack("!I", len(body)) + body)
            except OSError:
                continue  # it has gone meanwhile; the first collective says so

    def close(self) -> None:
        for connection, _ in self._connections:
            connection.close()


def _join(launch: Launch, channel: Channel, *, hello: dict[str, Any], deadline: float) -> Meeting:
    while time.monotonic() < deadline:
        card = read_card(channel.card())
        answer = _visit(*card, hello, deadline) if card else None
        if answer is None:
            time.sleep(0.05)
            continue
        message, address = answer
        if "error" in message:
            raise (RankFailedError if message["failed"] else HvdDDPError)(message["error"])
        host, port = message["store"]
        store = store_client(host, port)
        return _meeting(launch, message["peers"], store=store, store_address=(host, port), address=address)
    raise RankZeroMissingError(
        f"Rank 0 was not found before --start-timeout (this is rank {launch.rank} on {hello['host']}). See why it did "
        "not start (its log, its node), and whether all ranks see the same file system."
    )


def _visit(
    doors: list[tuple[str, int]], token: bytes, hello: dict[str, Any], deadline: float
) -> tuple[dict[str, Any], str] | None:
    """Knock at rank 0's addresses; None when nobody there knows our token (a stale card: look again)."""
    body = json.dumps(hello).encode()
    for host, port in doors:
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.settimeout(HANDSHAKE)
                greeting = _read(connection, GREETING)
                nonce = greeting[:NONCE]
                if not hmac.compare_digest(greeting[NONCE:], _seal(token, nonce, b"rank 0", b"")):
                    continue  # of a stale card: another program has the port by now, and would let us wait
                connection.sendall(_seal(token, nonce, b"hello", body) + struct.pack("!I", len(body)) + body)
                connection.settimeout(max(0.1, deadline + HANDSHAKE - time.monotonic()))
                head = _read(connection, MAC + LENGTH)
                (size,) = struct.unpack("!I", head[MAC:])
                answer = _read(connection, size) if size <= LARGEST_ANSWER else b""
                if hmac.compare_digest(head[:MAC], _seal(token, nonce, b"answer", answer)):
                    return json.loads(answer), str(connection.getsockname()[0])
        except (OSError, EOFError):
            continue
    return None


def _seal(token: bytes, nonce: bytes, kind: bytes, body: bytes) -> bytes:
    return hmac.digest(token, kind + nonce + body, "sha256")


async def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
