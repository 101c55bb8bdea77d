"""The handshake: a peer shows rank 0 that it knows the job's token, before anything it says is read.

HMAC-SHA256 over a nonce of rank 0 and the message. A connection that has come through stays open: `job/line.py` talks
over it for the rest of the job, each message sealed with the token, the nonce and a number of its own.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import resource
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from hvd_ddp.job.launch import Launch
from hvd_ddp.outside import from_json

NONCE, MAC, LENGTH = 16, 32, 4  # bytes
GREETING = NONCE + MAC
LARGEST_HELLO, LARGEST_ANSWER = 1 << 14, 1 << 22  # bytes
MOST_DOORS = 64  # addresses of one host
MOST = 1 << 31  # ranks, cores, numbers of processes
LAST_WORDS = 30.0  # seconds that a job which can't train waits for ranks that are still to come, to tell them
HANDSHAKE = 10.0  # seconds in which a peer that has connected must have shown the token


@dataclass(frozen=True)
class Connection:
    """A socket to a peer that knows the job's token."""

    socket: socket.socket
    token: bytes = field(repr=False)  # not for logs
    nonce: bytes

    def seal(self, kind: bytes, body: bytes) -> bytes:
        """What only a holder of the token can put before `body`; 32 bytes."""
        return seal(self.token, self.nonce, kind, body)


class Guests:
    """Rank 0's side of the handshake: the peers that have shown the token, and their open connections."""

    def __init__(self, token: bytes, world_size: int) -> None:
        self.hellos: dict[int, dict[str, Any]] = {}
        self.misfits: list[dict[str, Any]] = []  # of ranks that this job does not have
        self._token, self._world_size = token, world_size
        self._connections: list[tuple[dict[str, Any], Connection]] = []
        _allow_descriptors(world_size)

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
            hello = check_hello(from_json(await asyncio.wait_for(self._hello(connection, nonce), HANDSHAKE)))
            rank, fits = hello["rank"], hello["world_size"] == self._world_size
            if rank < 1 or rank in self.hellos or (fits and rank >= self._world_size):
                raise ValueError(f"rank {rank} is not awaited")
        except (OSError, ValueError, asyncio.TimeoutError, EOFError):
            connection.close()  # a stranger, or a peer that will try again
            return
        self._connections.append((hello, Connection(connection, self._token, nonce)))
        if rank < self._world_size:
            self.hellos[rank] = hello
        else:
            self.misfits.append(hello)

    async def _hello(self, connection: socket.socket, nonce: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, nonce + seal(self._token, nonce, b"rank 0", b""))
        head = await _receive_exactly(connection, MAC + LENGTH)
        (size,) = struct.unpack("!I", head[MAC:])
        if size > LARGEST_HELLO:
            raise ValueError("too long")
        body = await _receive_exactly(connection, size)
        if not hmac.compare_digest(head[:MAC], seal(self._token, nonce, b"hello", body)):
            raise ValueError("wrong token")
        return body

    def address(self, host: str) -> str:
        """This host's address over which most peers of other hosts came: one of the same host reaches any of them."""
        came = [(hello["host"] == host, peer.socket.getsockname()[0]) for hello, peer in self._connections]
        others = [address for here, address in came if not here] or [address for _, address in came]
        return str(max(others, key=others.count))

    def answer(self, message: dict[str, Any]) -> None:
        """Tell all that have come."""
        body = json.dumps(message).encode()
        for _, peer in self._connections:
            peer.socket.setblocking(True)
            peer.socket.settimeout(HANDSHAKE)
            try:
                peer.socket.sendall(peer.seal(b"answer", body) + struct.pack("!I", len(body)) + body)
            except OSError:
                continue  # it has gone meanwhile; the line says so

    def connections(self) -> dict[int, Connection]:
        """The open connection of each rank that has come."""
        return {int(hello["rank"]): peer for hello, peer in self._connections}

    def close(self) -> None:
        """Hang up."""
        for _, peer in self._connections:
            peer.socket.close()


def _allow_descriptors(world_size: int) -> None:
    """Rank 0 holds two connections a rank, and shells often allow 1,024 in all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * world_size + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def visit(
    doors: list[tuple[str, int]], token: bytes, hello: dict[str, Any], deadline: float
) -> tuple[dict[str, Any], Connection] | None:
    """Knock at rank 0's addresses; None when nobody there knows our token (a stale card: look again)."""
    for door in doors[:MOST_DOORS]:
        try:
            connection = socket.create_connection(door, timeout=5)
        except (OSError, ValueError, OverflowError):  # the last two: of a name or port that can be none
            continue
        try:
            peer, answer = _talk(connection, token, hello, deadline)
        except (OSError, EOFError, ValueError):
            connection.close()
            continue
        return answer, peer
    return None


def hello_of(launch: Launch, *, host: str, error: str | None) -> dict[str, Any]:
    """What a rank says of itself; `error` is what it found wrong before it came."""
    return {
        "rank": launch.rank,
        "world_size": launch.world_size,
        "host": host,
        "process": [os.getpid(), psutil.Process().create_time()],
        "node_rank": launch.node_rank,
        "cores": launch.cores,
        "error": error,
    }


def check_hello(hello: Any) -> dict[str, Any]:
    """What a rank says of itself; ValueError if it is none: of another version, or worse."""
    numbers = ("rank", "world_size", "cores", "node_rank")
    try:
        number, began = hello["process"]
        known = [hello[name] for name in numbers if name != "node_rank" or hello[name] is not None]
        fits = all(type(value) is int and 0 <= value < MOST for value in (number, *known)) and hello["cores"] > 0
        fits = fits and isinstance(began, int | float) and isinstance(hello["error"], str | None)
        fits = fits and isinstance(hello["host"], str) and hello["host"].isprintable()
    except (KeyError, TypeError) as error:
        raise ValueError("not what a rank says") from error
    if not fits:
        raise ValueError("not what a rank says")
    return hello  # type: ignore[no-any-return]


def _talk(
    connection: socket.socket, token: bytes, hello: dict[str, Any], deadline: float
) -> tuple[Connection, dict[str, Any]]:
    body = json.dumps(hello).encode()
    connection.settimeout(HANDSHAKE)
    greeting = _read(connection, GREETING, time.monotonic() + HANDSHAKE)
    peer = Connection(connection, token, greeting[:NONCE])
    if not hmac.compare_digest(greeting[NONCE:], peer.seal(b"rank 0", b"")):
        raise ValueError("of a stale card: another program has the port by now, and would let us wait")
    connection.sendall(peer.seal(b"hello", body) + struct.pack("!I", len(body)) + body)
    head = _read(connection, MAC + LENGTH, deadline + HANDSHAKE)
    (size,) = struct.unpack("!I", head[MAC:])
    answer = _read(connection, size, deadline + HANDSHAKE) if size <= LARGEST_ANSWER else b""
    if not hmac.compare_digest(head[:MAC], peer.seal(b"answer", answer)):
        raise ValueError("not from rank 0")
    message = from_json(answer)
    if not isinstance(message, dict):
        raise ValueError("of another version")
    return peer, message


def seal(token: bytes, nonce: bytes, kind: bytes, body: bytes) -> bytes:
    """HMAC-SHA256 (RFC 2104); 32 bytes."""
    return hmac.digest(token, kind + nonce + body, "sha256")


async def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    """All of it by then, however slowly it drips."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        if data and time.monotonic() > deadline:
            raise TimeoutError
        piece = connection.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
