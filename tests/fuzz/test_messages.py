"""Messages between ranks: before the token, with it, and over an open line; cards that name rank 0."""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.guard import fuzz
from fuzz.mutations import as_json, changed, json_files, spoilt, strange, values
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job import handshake, health, rendezvous
from hvd_ddp.job.channels import FileChannel, read_card
from hvd_ddp.job.failure import record
from hvd_ddp.job.handshake import Connection, Guests, seal
from hvd_ddp.job.launch import Launch
from hvd_ddp.job.pulse import Place
from hvd_ddp.job.rendezvous import Meeting

TOKEN, NONCE = b"t" * 32, b"n" * 16
HELLO = {"rank": 1, "world_size": 2, "host": "b", "process": [1, 2.0], "node_rank": None, "cores": 1, "error": None}
OWN = HELLO | {"rank": 0, "host": "a"}
LAUNCHES = [
    Launch(launcher="openmpi", rank=rank, local_rank=0, world_size=2, local_world_size=1, node_rank=rank, job="x",
           cores=1, hosts=("a", "b"))
    for rank in (0, 1)
]  # fmt: skip


def framed(mac: bytes, body: bytes) -> bytes:
    return mac + struct.pack("!I", len(body)) + body


hellos = st.one_of(json_files(HELLO), changed(HELLO).map(as_json), changed(HELLO).map(as_json))


@fuzz(
    80,
    [
        b"{" * 9000,
        as_json(HELLO | {"rank": 1e400}),
        as_json({**HELLO, "cores": "x"}),
        as_json({"rank": 1, "world_size": 2}),
    ],
    body=hellos,
    token=st.sampled_from(["right", "right", "right", "wrong", "none"]),
    again=st.booleans(),
)
def test_hello(folder: Path, body: bytes, token: str, again: bool) -> None:
    """Who is let in is one that the job can go on with; else the door stays open for the right one."""

    async def greet() -> None:
        for said in [body, body] if again else [body]:
            here, there = socket.socketpair()
            here.setblocking(False)
            task = asyncio.ensure_future(guests._greet(here))
            loop = asyncio.get_running_loop()
            there.setblocking(False)
            greeting = b""
            while len(greeting) < handshake.GREETING:
                greeting += await loop.sock_recv(there, handshake.GREETING)
            mac = seal(TOKEN if token == "right" else b"", greeting[: handshake.NONCE], b"hello", said)
            with contextlib.suppress(OSError):
                await loop.sock_sendall(there, framed(mac, said) if token != "none" else said)
            there.shutdown(socket.SHUT_WR)
            await task
            there.close()

    guests = Guests(TOKEN, 2)
    guests.hellos[0] = OWN
    asyncio.run(greet())
    if token != "right":
        assert not guests._connections
    peers = [guests.hellos.get(rank, {}) for rank in range(2)]
    missing = [rank for rank in range(2) if rank not in guests.hellos]
    try:
        problem = rendezvous._problem([*peers, *guests.misfits], missing, LAUNCHES[0])
        assert problem or len(guests.hellos) == 2
        if problem is None:
            connections = guests.connections()
            rendezvous._meeting(LAUNCHES[0], peers, store=None, address="127.0.0.1", connections=connections)  # type: ignore[arg-type]
    finally:
        guests.close()


ANSWER = {"peers": [OWN, HELLO], "store": ["127.0.0.1", 1]}


@fuzz(60, answer=st.one_of(changed(ANSWER), changed({"error": "x", "failed": True})))
def test_answer(folder: Path, answer: Any) -> None:
    """Of rank 0 to a rank that joins."""
    before = rendezvous.visit, rendezvous.store_client, rendezvous.source_address
    rendezvous.visit = lambda *_: (answer, None) if isinstance(answer, dict) else None  # type: ignore[assignment]
    rendezvous.store_client = lambda *_: None  # type: ignore[assignment]
    rendezvous.source_address = lambda *_: "127.0.0.1"
    try:
        rendezvous._join(LAUNCHES[1], Cards(), hello=HELLO, deadline=time.monotonic() + 0.1)  # type: ignore[arg-type]
    finally:
        rendezvous.visit, rendezvous.store_client, rendezvous.source_address = before


class Cards:
    def card(self) -> bytes:
        return b'{"addresses": [["127.0.0.1", 1]], "token": "00"}'


@fuzz(60, body=st.one_of(json_files(ANSWER), values.map(as_json)),
      told=st.sampled_from(["all", "cut", "unsealed", "other greeting", "oversized"]))  # fmt: skip
def test_talk(folder: Path, body: bytes, told: str) -> None:
    """What seems to be rank 0 answers anything."""
    here, there = socket.socketpair()
    there.settimeout(5.0)
    nonce = NONCE
    sealing = TOKEN if told != "other greeting" else b""
    answer = framed(seal(TOKEN if told != "unsealed" else b"", nonce, b"answer", body), body)
    answer = answer[:-1] if told == "cut" else b"\0" * 32 + b"\xff" * 4 if told == "oversized" else answer
    data = nonce + seal(sealing, nonce, b"rank 0", b"") + answer

    def send() -> None:
        with contextlib.suppress(OSError):
            there.sendall(data)
            there.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        _, message = handshake._talk(here, TOKEN, HELLO, time.monotonic() + 1.0)
        assert told == "all" and isinstance(message, dict)
    except (OSError, EOFError, ValueError):
        pass  # `visit` goes on to the next door
    finally:
        here.close()
        there.close()
        sender.join(5.0)


CARD = {"addresses": [["127.0.0.1", 1], ["", 0]], "token": "00" * 32}
ODD = [["a" * 70, 1], [".", 1], ["127.0.0.1", 10**6], ["127.0.0.1", -1], ["\0", 1], ["127.0.0.1", 1e400], ["\udcff", 2]]


@fuzz(60, [as_json(CARD | {"addresses": [one]}) for one in ODD], card=json_files(CARD))
def test_card(folder: Path, card: bytes) -> None:
    """Of rank 0; whoever it sends us to."""
    found = read_card(card)
    if found is None:
        return
    doors, token = found
    near = [door for door in doors if door[0] in ("127.0.0.1", "") or door in [(str(one[0]), one[1]) for one in ODD]]
    assert handshake.visit(near[:3], token, HELLO, time.monotonic() + 0.1) is None


@fuzz(15, what=strange)
def test_card_file(folder: Path, what: Any) -> None:
    directory = folder / "inside"
    channel = FileChannel(directory, "../x")
    what(channel._path, folder)
    card = channel.card()
    assert card is None or what.__name__ == "_linked"
    FileChannel(directory, "x").offer(b"{}")
    with contextlib.suppress(HvdDDPError):
        channel.offer(b"{}")


# The line

BEAT = {"moves": 1, "step": 2, "phase": "forward", "long": False}
ORDER = {"why": "signal USR2", "exit_code": 75}
FAILURE = record(LAUNCHES[0], 1, Place(), "RuntimeError: x", consequence=False)
VERDICT = {"rank": 1, "exit_code": 1, "still": None, "kill": None}
TO_MAIN = [["beat", BEAT], ["failure", FAILURE], ["please stop", ORDER], ["aware", 3], ["here", None]]
FROM_MAIN = [["beat", BEAT], ["verdict", VERDICT], ["stop", ORDER], ["stop after", 4]]


class Errors(logging.Handler):
    """What asyncio says of callbacks and tasks that raised."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, entry: logging.LogRecord) -> None:
        self.said.append(self.format(entry))


def bodies(valid: list[Any]) -> st.SearchStrategy[list[bytes]]:
    """Some messages, most of them changed."""
    one = st.sampled_from(valid)
    odd = [b"[" * 50_000, b"5", b'["beat", "x", 1]', b'"beat"', b"{}", b'[["beat"], 1]']
    said = st.one_of(
        one.flatmap(changed).map(as_json),
        one.flatmap(changed).map(as_json),
        one.map(as_json),
        one.flatmap(lambda message: spoilt(as_json(message))),
        st.sampled_from(odd),
    )
    return st.lists(said, min_size=1, max_size=4)


def talk(rank: int, said: list[bytes], how: str) -> None:
    """The line of that rank hears it; then the other hangs up. It ends the job, and nothing in it breaks."""
    here, there = socket.socketpair()
    meeting = Meeting(
        LAUNCHES[rank], None, "127.0.0.1", "lo", 1, [(1, 2.0)] * 2, {1 - rank: Connection(here, TOKEN, NONCE)}
    )  # type: ignore[arg-type]
    meeting.stop.signals = None
    ends: list[int] = []
    done, errors = threading.Event(), Errors()
    logging.getLogger("asyncio").addHandler(errors)
    logging.getLogger("asyncio").propagate = False
    before = os._exit, health.say, health.GRACE

    def leave(code: int) -> None:
        ends.append(code)
        done.set()

    os._exit, health.say, health.GRACE = leave, lambda *_, **__: None, 0.0  # type: ignore[assignment]
    job = health._Health(meeting, timeout=30.0)
    try:
        direction = b"to 0" if rank == 0 else b"from 0"
        other = Connection(there, TOKEN, NONCE)
        for number, body in enumerate(said, 1):
            number = number if how != "replayed" else 1
            frame = framed(other.seal(b"line %s %d" % (direction, number), body), body)
            with contextlib.suppress(OSError):
                there.sendall(frame if how != "unsealed" else b"\0" + frame[1:])
        there.shutdown(socket.SHUT_WR)
        threading.Thread(target=drain, args=(there,), daemon=True).start()
        if rank == 0 and any(b"here" in body for body in said):
            job.line.tell_main("here")  # the peer may leave once it has said so; rank 0 comes to the end as well
        deadline = time.monotonic() + 5.0
        while not done.is_set() and not meeting_ended(job) and time.monotonic() < deadline:
            time.sleep(0.002)
        assert done.is_set() or meeting_ended(job), "the job goes on without a peer"
        assert all(type(code) is int and 0 <= code < 256 for code in ends), ends
        assert job.line._thread.is_alive()
    finally:
        job.line.close()
        os._exit, health.say, health.GRACE = before  # type: ignore[assignment]
        logging.getLogger("asyncio").removeHandler(errors)
        there.close()
        here.close()
    assert not errors.said, errors.said[0][-1500:]


def meeting_ended(job: Any) -> bool:
    """All have come to the end."""
    return bool(job._ended.is_set())


def drain(connection: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError):
        while connection.recv(1 << 16):
            pass


how = st.sampled_from(["sealed", "sealed", "sealed", "unsealed", "replayed"])


@fuzz(50, [[as_json(message)] for message in TO_MAIN], said=bodies(TO_MAIN), how=how)
def test_line_to_rank_0(folder: Path, said: list[bytes], how: str) -> None:
    talk(0, said, how)


@fuzz(50, [[as_json(message)] for message in FROM_MAIN], said=bodies(FROM_MAIN), how=how)
def test_line_from_rank_0(folder: Path, said: list[bytes], how: str) -> None:
    talk(1, said, how)
