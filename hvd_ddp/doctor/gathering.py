"""The ranks of the job, as many as come: where training would refuse, the doctor goes on with those that are here.

The rendezvous and the line are training's own (job/), without the store, which needs torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvd_ddp.doctor.check import refused, within
from hvd_ddp.errors import FAILED, HvdDDPError
from hvd_ddp.job.channels import channel_for, read_card, write_card
from hvd_ddp.job.handshake import Connection, Guests, hello_of, visit
from hvd_ddp.job.launch import Launch
from hvd_ddp.job.line import Line
from hvd_ddp.job.network import LOOPBACK, addresses, listen

LATE = 20.0  # seconds beyond any deadline, after which it is the file system that hangs
BEAT = 5.0  # seconds
PARTING = 0.5  # seconds that the others have to hear how it ends
Answers = dict[str, Callable[[Any], Any]]  # topic -> (what rank 0 says with it) -> answer; what JSON can carry


class NobodyError(Exception):
    """Rank 0 was not found: why, and what to do."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.detail, self.remedy = detail, remedy


@dataclass(frozen=True)
class Peer:
    """A rank that came, and its address on the network that the job uses."""

    rank: int
    host: str
    address: str


class Gathering:
    """Rank 0 asks, the others answer. Nothing waits longer than it is told to."""

    def __init__(self, launch: Launch, peers: dict[int, Peer], connections: dict[int, Connection]) -> None:
        """`peers`: on rank 0 those that came, itself as well; elsewhere empty."""
        self.launch, self.peers = launch, peers
        self.strangers: list[dict[str, Any]] = []  # ranks of another world size
        self.clocks: dict[int, tuple[float, float]] = {}  # rank -> (seconds there and back, how far it is ahead)
        self._asked: queue.SimpleQueue[tuple[int, str, Any, list[int]]] = queue.SimpleQueue()
        self._number = 0  # of questions: an answer that comes too late is to none of the next
        self._told: dict[int, dict[int, Any]] = {}
        self._gone: set[int] = set()
        self._news = threading.Condition()
        self._line = Line(launch.rank, connections)
        self._line.on |= {
            "ask": lambda _, question: self._asked.put(question),
            "answer": self._hear,
            "what time": lambda _, asked: self._line.tell_main("time", [asked, time.time()]),
            "time": self._hear_time,
        }
        self._line.on_lost = self._lose
        self._line.start(beat=BEAT)

    @property
    def missing(self) -> list[int]:
        """Ranks that never came."""
        return [rank for rank in range(self.launch.world_size) if rank not in self.peers]

    @property
    def hosts(self) -> dict[str, list[int]]:
        """Ranks of each host, in order."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self.peers):
            found.setdefault(self.peers[rank].host, []).append(rank)
        return found

    def ask(self, topic: str, value: Any, ranks: list[int], answers: Answers, seconds: float) -> dict[int, Any]:
        """On rank 0: what these ranks answer, as far as it comes in time. Its own answer is made here and now."""
        self._number += 1
        told = self._told[self._number] = {}
        self._line.tell_all("ask", [self._number, topic, value, ranks])
        mine = {0: answers[topic](value)} if 0 in ranks else {}
        with self._news:
            self._news.wait_for(lambda: set(ranks) <= {*mine, *told, *self._gone}, seconds)
            return mine | told

    def ask_for_the_time(self, times: int, pause: float) -> None:
        """Read the clocks of all ranks into `clocks`; the quickest answer counts."""
        for _ in range(times):
            self._line.tell_all("what time", time.time())
            time.sleep(pause)

    def end(self, verdict: int) -> None:
        """On rank 0: tell all to leave with this exit code, and hang up."""
        self._line.tell_all("ask", [0, "end", verdict, []])
        time.sleep(PARTING)
        self.close()

    def serve(self, answers: Answers, seconds: float) -> int:
        """On all other ranks: answer until rank 0 says the exit code. Raises NobodyError when it is silent so long."""
        while True:
            try:
                number, topic, value, ranks = self._asked.get(timeout=seconds)
            except queue.Empty:
                raise NobodyError("rank 0 does not ask any more", "See its last lines, and its node.") from None
            if topic == "end":
                return int(value)
            if self.launch.rank in ranks:
                mine = partial(answers[topic], value)
                with contextlib.suppress(TimeoutError):
                    self._line.tell_main("answer", [number, within(seconds, mine)])

    def close(self) -> None:
        """Hang up: the others take this process for ended."""
        self._line.close()

    def _hear(self, rank: int, message: Any) -> None:
        number, value = message
        with self._news:
            self._told[number][rank] = value
            self._news.notify_all()

    def _hear_time(self, rank: int, answer: list[float]) -> None:
        now, (asked, theirs) = time.time(), answer
        self.clocks[rank] = min(self.clocks.get(rank, (1e9, 0.0)), (now - asked, theirs - (asked + now) / 2))

    def _lose(self, rank: int) -> None:
        with self._news:
            self._gone.add(rank)
            self._news.notify_all()
        if self.launch.rank:
            self._asked.put((0, "end", FAILED, []))


def gather(launch: Launch, directory: Path, seconds: float) -> Gathering:
    """Meet those ranks that come within so many seconds. Raises NobodyError on ranks that rank 0 does not answer."""
    host = socket.gethostname()
    if launch.world_size == 1:
        return Gathering(launch, {0: Peer(0, host, LOOPBACK)}, {})
    meet = _host if launch.rank == 0 else _join
    deadline = time.monotonic() + seconds
    try:
        return within(2 * seconds + LATE, lambda: meet(launch, channel_for(launch, directory), host, deadline))
    except TimeoutError as error:
        raise NobodyError(f"{directory.absolute()}: {error}", "See whether its file system answers.") from error
    except HvdDDPError as error:
        known = refused("ranks", error)
        raise NobodyError(known.detail, known.remedy) from error
    except (ImportError, OSError) as error:  # torchrun's store without torch; no port is free
        raise NobodyError(f"the ranks can't meet: {error}", "Mend what else is said here.") from error


def _host(launch: Launch, channel: Any, host: str, deadline: float) -> Gathering:
    token = secrets.token_bytes(32)
    guests = Guests(token, launch.world_size)
    guests.hellos[0] = {"host": host}
    listeners = [listen(address) for address in _doors(launch)]
    channel.offer(write_card([listener.getsockname()[:2] for listener in listeners], token))
    asyncio.run(guests.receive(listeners, deadline))
    with contextlib.suppress(Exception):  # a launcher's store that has gone
        channel.withdraw()
    guests.answer({"peers": sorted(guests.hellos)})
    came = guests.connections()
    peers = {0: Peer(0, host, guests.address(host) if came else LOOPBACK)}
    for rank, connection in came.items():
        with contextlib.suppress(OSError):  # it has gone again
            address = connection.socket.getpeername()[0]
            if rank in guests.hellos:
                peers[rank] = Peer(rank, guests.hellos[rank]["host"], address)
            else:
                connection.socket.close()
    gathering = Gathering(launch, peers, {rank: came[rank] for rank in peers if rank})
    size = launch.world_size
    others = [hello for hello in guests.hellos.values() if hello.get("world_size", size) != size]
    gathering.strangers = guests.misfits + others
    return gathering


def _doors(launch: Launch) -> list[str]:
    if launch.local_world_size == launch.world_size:
        return [LOOPBACK]
    for wish in (launch.interfaces, None):
        with contextlib.suppress(HvdDDPError):  # the check of the interfaces says it
            return addresses(wish)
    return [LOOPBACK]


def _join(launch: Launch, channel: Any, host: str, deadline: float) -> Gathering:
    hello = hello_of(launch, host=host, error=None)
    card = None
    while time.monotonic() < deadline:
        card = read_card(channel.card()) or card
        answer = visit(*card, hello, deadline) if card else None
        if answer is not None:
            return Gathering(launch, {}, {0: answer[1]})
        time.sleep(0.05)
    if card is None:
        raise NobodyError(
            "rank 0 left no word where this rank looks for it",
            "See whether rank 0 started, and whether both see the same files in the working directory (or --run-dir).",
        )
    doors = ", ".join(f"{address}:{port}" for address, port in card[0])
    raise NobodyError(
        f"rank 0 listens on {doors}, but none of these answers here",
        "Open all TCP ports between the nodes, or name the interface that connects them: NCCL_SOCKET_IFNAME.",
    )
