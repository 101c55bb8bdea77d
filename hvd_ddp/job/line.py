"""Messages between rank 0 and every other rank while the job runs, over the connections of the rendezvous.

A thread of its own with sockets of its own, not the store: while the process that hosts a TCPStore is stopped, its
clients block past any timeout, and a store can't tell that a process has died. A closed connection tells at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from hvd_ddp.job.handshake import LENGTH, MAC, Connection
from hvd_ddp.outside import from_json

LARGEST_MESSAGE = 1 << 20  # bytes
LARGEST_BACKLOG = 1 << 22  # bytes that may wait for a peer which does not read

Handler = Callable[[int, Any], None]  # (rank that says it, value); ValueError: who says such a thing is hung up on
T = TypeVar("T")


def told(kind: type[T], value: Any) -> T:
    """The dataclass of plain types that a message carries as a dict. Raises ValueError for anything else."""
    types = _types(kind)  # type: ignore[arg-type]
    if not isinstance(value, dict) or {name: type(each) for name, each in value.items()} != types:
        raise ValueError(f"no {kind.__name__}")
    return kind(**value)


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def told_number(value: Any) -> int:
    """The whole number that a message carries. Raises ValueError for anything else."""
    if type(value) is not int:
        raise ValueError("no number")
    return value


class Line:
    """Calls handlers on its own thread. Any thread may tell. Rank 0 hears itself too, so that it is like the others."""

    def __init__(self, rank: int, connections: dict[int, Connection]) -> None:
        """`connections`: on rank 0 one to every other rank, elsewhere one to rank 0."""
        self.rank = rank
        self.on: dict[str, Handler] = {}
        self.on_lost: Callable[[int], None] = lambda rank: None  # the connection is closed: the process has ended
        self.on_beat: Callable[[], None] = lambda: None
        self.heard = dict.fromkeys(connections, time.monotonic())  # when each peer last said something
        self._peers = {rank: _Peer(connection, away=self.rank == 0) for rank, connection in connections.items()}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="line", daemon=True)
        self._beat = 1.0

    def start(self, *, beat: float) -> None:
        """Start the thread; `on_beat` is called every `beat` seconds."""
        self._beat = beat
        self._thread.start()

    def tell_main(self, kind: str, value: Any = None) -> None:
        """To rank 0."""
        self._soon(functools.partial(self._deliver, 0, kind, value))

    def tell_all(self, kind: str, value: Any = None) -> None:
        """From rank 0 to every rank, itself as well."""
        for rank in (*self._peers, 0):
            self._soon(functools.partial(self._deliver, rank, kind, value))

    def call_later(self, seconds: float, work: Callable[[], None]) -> None:
        """On the line's thread, where handlers run."""
        self._loop.call_later(seconds, work)

    def listen_to(self, descriptor: int, ready: Callable[[], None]) -> None:
        """Call `ready` on the line's thread when there is something to read."""
        self._soon(lambda: self._loop.add_reader(descriptor, ready))

    def close(self) -> None:
        """Hang up; peers take this process for ended."""
        self._soon(self._stop)
        self._thread.join(1.0)

    def _soon(self, work: Callable[[], Any]) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(work)

    def _deliver(self, rank: int, kind: str, value: Any) -> None:
        if rank == self.rank:
            self.on[kind](self.rank, value)
        else:
            self._peers[rank].say(kind, value)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        tasks = [self._loop.create_task(self._listen(rank, peer)) for rank, peer in self._peers.items()]
        self._loop.call_soon(self._tick)
        self._loop.run_forever()
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _stop(self, tries: int = 50) -> None:
        """Not before connections that are just being opened have taken what was said: it may be last words."""
        if tries and any(peer.opening for peer in self._peers.values()):
            self._loop.call_later(0.01, self._stop, tries - 1)
        else:
            self._loop.stop()

    def _tick(self) -> None:
        self.on_beat()
        self._loop.call_later(self._beat, self._tick)

    async def _listen(self, rank: int, peer: _Peer) -> None:
        try:
            await peer.open()
            while True:
                kind, value = await peer.hear()
                self.heard[rank] = time.monotonic()
                if kind in self.on:
                    self.on[kind](rank, value)
        except (OSError, EOFError, ValueError):
            self.on_lost(rank)
        finally:
            peer.close()


class _Peer:
    """One connection, on the line's thread. Messages are sealed with their number: none is slipped in or told again."""

    def __init__(self, connection: Connection, *, away: bool) -> None:
        self._connection = connection
        self._directions = (b"from 0", b"to 0") if away else (b"to 0", b"from 0")
        self._said = self._heard = 0
        self._writer: asyncio.StreamWriter | None = None
        self._early: list[bytes] = []

    @property
    def opening(self) -> bool:
        return self._writer is None

    async def open(self) -> None:
        self._connection.socket.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection.socket)
        self._writer.writelines(self._early)

    def say(self, kind: str, value: Any) -> None:
        if self._writer is not None:
            if self._writer.is_closing():
                return  # it is gone
            if self._writer.transport.get_write_buffer_size() >= LARGEST_BACKLOG:
                return  # it does not read; should it come back, what follows is in order
        body = json.dumps([kind, value]).encode()
        self._said += 1
        frame = self._seal(self._directions[0], self._said, body) + struct.pack("!I", len(body)) + body
        if self._writer is None:
            self._early.append(frame)
        else:
            self._writer.write(frame)

    async def hear(self) -> tuple[str, Any]:
        head = await self._reader.readexactly(MAC + LENGTH)
        (size,) = struct.unpack("!I", head[MAC:])
        if size > LARGEST_MESSAGE:
            raise ValueError("too long")
        body = await self._reader.readexactly(size)
        self._heard += 1
        if not hmac.compare_digest(head[:MAC], self._seal(self._directions[1], self._heard, body)):
            raise ValueError("not sealed with the job's token")
        message = from_json(body)
        if not isinstance(message, list) or len(message) != 2 or not isinstance(message[0], str):
            raise ValueError("no message")
        return message[0], message[1]

    def _seal(self, direction: bytes, number: int, body: bytes) -> bytes:
        return self._connection.seal(b"line %s %d" % (direction, number), body)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
