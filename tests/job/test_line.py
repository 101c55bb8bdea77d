"""Messages between rank 0 and the others: real sockets on loopback, lines in threads, each wait with a hard limit."""

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launchers import run

from hvd_ddp.job import line as module
from hvd_ddp.job.handshake import Connection
from hvd_ddp.job.line import Line

TOKEN, NONCE = b"t" * 32, b"n" * 16
AT_ONCE = 3.0  # seconds; on a busy machine


def wait_for(condition: Callable[[], Any], limit: float = 10.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def pair(nonce: bytes = NONCE, token: bytes = TOKEN) -> tuple[Connection, Connection]:
    """The two ends of a connection after the handshake: rank 0's, the other's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname())
        here, _ = server.accept()
    return Connection(here, token, nonce), Connection(there, token, nonce)


class End:
    """A line, and what came over it."""

    def __init__(self, rank: int, connections: dict[int, Connection]) -> None:
        self.line = Line(rank, connections)
        self.heard: list[tuple[int, Any]] = []
        self.lost: list[int] = []
        self.threads: set[str] = set()
        self.line.on["say"] = self._hear
        self.line.on_lost = self.lost.append

    def _hear(self, rank: int, value: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.heard.append((rank, value))

    def start(self, beat: float = 60.0) -> "End":
        self.line.start(beat=beat)
        return self


@pytest.fixture
def three() -> Iterator[list[End]]:
    """Lines of a job of three ranks, not started."""
    (one, first), (two, second) = pair(), pair(b"m" * 16)
    ends = [End(0, {1: one, 2: two}), End(1, {0: first}), End(2, {0: second})]
    yield ends
    for end in ends:
        if end.line._thread.is_alive():
            end.line.close()


class Raw:
    """Rank 1 of three by hand, whose frames may be anything; rank 2 is as it should be."""

    def __init__(self) -> None:
        (one, self.connection), (two, second) = pair(), pair(b"m" * 16)
        self.main, self.other = End(0, {1: one, 2: two}).start(), End(2, {0: second}).start()
        self.socket = self.connection.socket

    def frame(self, number: int = 1, body: bytes = b'["say", 1]', direction: bytes = b"to 0", **other: Any) -> bytes:
        connection = Connection(self.socket, other.get("token", TOKEN), other.get("nonce", NONCE))
        mac = connection.seal(b"line %s %d" % (direction, number), body)
        return mac + struct.pack("!I", len(body)) + body

    def is_closed(self) -> bool:
        self.socket.settimeout(AT_ONCE)
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            return True
        return True

    def close(self) -> None:
        self.socket.close()
        self.main.line.close()
        self.other.line.close()


@pytest.fixture
def raw() -> Iterator[Raw]:
    found = Raw()
    yield found
    found.close()


# What is told arrives


def test_all_arrives_in_order_both_ways(three: list[End]) -> None:
    main, first, second = (end.start() for end in three)
    for number in range(2000):
        main.line.tell_all("say", ["from", 0, number])
        first.line.tell_main("say", {"number": number})
        second.line.tell_main("say", number)
        main.line.tell_main("say", None)  # rank 0 to itself
    wait_for(lambda: len(main.heard) == 8000 and len(first.heard) == len(second.heard) == 2000)
    told = [(0, ["from", 0, number]) for number in range(2000)]
    assert first.heard == second.heard == told
    assert [entry for entry in main.heard if entry[0] == 1] == [(1, {"number": number}) for number in range(2000)]
    assert [entry for entry in main.heard if entry[0] == 2] == [(2, number) for number in range(2000)]
    assert [entry for entry in main.heard if entry[0] == 0 and entry[1] is not None] == told
    assert main.heard.count((0, None)) == 2000
    assert main.lost == first.lost == second.lost == []


def test_many_threads_may_tell(three: list[End]) -> None:
    main, first, _ = (end.start() for end in three)

    def work(name: int) -> None:
        for number in range(300):
            first.line.tell_main("say", [name, number])

    threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(main.heard) == 1800)
    for name in range(6):
        assert [value[1] for _, value in main.heard if value[0] == name] == [*range(300)]


def test_what_is_told_early_waits(three: list[End]) -> None:
    """Before the line has opened its connections, and long before the other side has."""
    main, first, second = three
    for number in range(5):
        main.line.tell_all("say", number)
    main.start()
    main.line.tell_all("say", 5)
    time.sleep(0.2)
    first.start()
    second.start()
    wait_for(lambda: len(first.heard) == len(second.heard) == len(main.heard) == 6)
    assert first.heard == second.heard == main.heard == [(0, number) for number in range(6)]


def test_a_large_message(three: list[End]) -> None:
    main, first, _ = (end.start() for end in three)
    first.line.tell_main("say", "x" * 1_000_000)
    wait_for(lambda: main.heard)
    assert main.heard == [(1, "x" * 1_000_000)]


def test_handlers_run_on_the_lines_thread(three: list[End]) -> None:
    main, first, _ = (end.start(beat=0.02) for end in three)
    threads, beats = set(), []
    main.line.on_beat = lambda: beats.append(threading.current_thread().name)
    main.line.tell_all("say", 1)
    first.line.tell_main("say", 1)
    main.line.on["say"] = lambda *_: main.line.call_later(0.05, lambda: threads.add(threading.current_thread().name))
    first.line.tell_main("say", 1)
    wait_for(lambda: threads and len(beats) > 3)
    assert {*threads, *beats, *main.threads, *first.threads} == {"line"}


def test_a_descriptor_is_listened_to(three: list[End]) -> None:
    reader, writer = os.pipe()
    came = []
    main = three[0].start()
    main.line.listen_to(reader, lambda: came.append(os.read(reader, 10)))
    os.write(writer, b"ab")
    wait_for(lambda: came)
    assert came == [b"ab"]
    main.line.close()
    os.close(reader)
    os.close(writer)


def test_it_is_known_when_each_was_last_heard(raw: Raw) -> None:
    wait_for(lambda: time.monotonic() > raw.main.line.heard[1])
    before = dict(raw.main.line.heard)
    time.sleep(0.05)
    raw.socket.sendall(raw.frame())
    wait_for(lambda: raw.main.heard)
    assert raw.main.line.heard[1] > before[1]
    assert raw.main.line.heard[2] == before[2]


# What is not from the job


def cut(raw: Raw) -> None:
    raw.socket.sendall(raw.frame()[:40])
    raw.socket.shutdown(socket.SHUT_WR)


def of_another_job(raw: Raw) -> None:
    raw.socket.sendall(raw.frame(token=b"u" * 32))


def of_another_connection(raw: Raw) -> None:
    raw.socket.sendall(raw.frame(nonce=b"m" * 16))


def altered(raw: Raw) -> None:
    raw.socket.sendall(raw.frame().replace(b'["say", 1]', b'["say", 2]'))


def replayed(raw: Raw) -> None:
    raw.socket.sendall(raw.frame(body=b'["other", 1]') * 2)


def wrongly_numbered(raw: Raw) -> None:
    raw.socket.sendall(raw.frame(number=2))


def sent_back(raw: Raw) -> None:
    raw.main.line.tell_all("say", "for rank 1")
    said = raw.socket.recv(1 << 16)
    wait_for(lambda: raw.main.heard)
    raw.main.heard.clear()  # what rank 0 told itself
    raw.socket.sendall(said)


def oversized(raw: Raw) -> None:
    raw.socket.sendall(b"\0" * 32 + struct.pack("!I", module.LARGEST_MESSAGE + 1))  # and not a byte more


def oversized_and_sealed(raw: Raw) -> None:
    raw.socket.sendall(raw.frame(body=json.dumps(["say", "x" * module.LARGEST_MESSAGE]).encode()))


def garbage(raw: Raw) -> None:
    raw.socket.sendall(os.urandom(32) + struct.pack("!I", 100) + os.urandom(100))


def no_json(raw: Raw) -> None:
    raw.socket.sendall(raw.frame(body=b"\xff{"))


FRAMES = [cut, of_another_job, of_another_connection, altered, replayed, wrongly_numbered, sent_back, oversized,
          oversized_and_sealed, garbage, no_json]  # fmt: skip


@pytest.mark.parametrize("say", FRAMES, ids=lambda say: say.__name__)
def test_what_is_not_as_it_should_be_closes_the_connection(say: Callable[[Raw], None], raw: Raw) -> None:
    say(raw)
    wait_for(lambda: raw.main.lost)
    assert raw.is_closed()
    assert raw.main.lost == [1]
    assert raw.main.heard == []
    raw.other.line.tell_main("say", "still here")
    wait_for(lambda: raw.main.heard)
    assert raw.main.heard == [(2, "still here")]
    raw.main.line.tell_all("say", "nobody minds")
    wait_for(lambda: raw.other.heard)


def test_what_is_as_it_should_be_is_heard(raw: Raw) -> None:
    """Else all of the tests above pass for the wrong reason."""
    raw.socket.sendall(raw.frame() + raw.frame(number=2, body=b'["of another version", 1]'))
    raw.socket.sendall(raw.frame(number=3, body=b'["say", 3]'))
    wait_for(lambda: len(raw.main.heard) == 2)
    assert raw.main.heard == [(1, 1), (1, 3)]
    assert raw.main.lost == []


# Ends


def test_the_end_of_a_process_is_told_at_once(raw: Raw) -> None:
    raw.socket.sendall(raw.frame())
    began = time.monotonic()
    raw.socket.close()
    wait_for(lambda: raw.main.lost)
    assert time.monotonic() - began < AT_ONCE
    assert raw.main.heard == [(1, 1)], "its last words count"
    assert raw.main.lost == [1]


def test_a_reset_connection_is_an_end(raw: Raw) -> None:
    raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.socket.close()
    wait_for(lambda: raw.main.lost)


def test_the_end_of_rank_0_is_told_to_all(three: list[End]) -> None:
    main, first, second = (end.start() for end in three)
    main.line.tell_all("say", "last words")
    main.line.close()
    wait_for(lambda: first.lost and second.lost)
    assert first.lost == second.lost == [0]
    assert first.heard == second.heard == [(0, "last words")]
    assert main.lost == [], "one's own end is no loss"
    assert not main.line._thread.is_alive()
    main.line.tell_all("say", "nobody hears it, and nothing happens")
    first.line.tell_main("say", "nor this")
    first.line.close()
    first.line.close()


def test_who_does_not_read_holds_nobody_up(raw: Raw) -> None:
    """Stopped, or cut off: rank 0 goes on, and what waits for that one is bounded."""
    text = "x" * 100_000
    for number in range(1, 401):
        raw.main.line.tell_all("say", text)  # 40 MB, no faster than the one that reads
        wait_for(lambda number=number: len(raw.other.heard) == len(raw.main.heard) == number, 30.0)
    writer = raw.main.line._peers[1]._writer
    assert writer is not None
    waits = writer.transport.get_write_buffer_size()
    assert 0 < waits < module.LARGEST_BACKLOG + 200_000
    assert raw.main.lost == []


def test_who_reads_again_is_not_lost(three: list[End]) -> None:
    """What did not fit is missing, all else is in order."""
    main, first, second = three
    main.start()
    second.start()
    for number in range(200):
        main.line.tell_all("say", [number, "x" * 100_000])  # no faster than the one that reads
        wait_for(lambda number=number: len(second.heard) == number + 1, 30.0)
    first.start()
    wait_for(lambda: first.heard, 30.0)
    wait_for(lambda: main.line._peers[1]._writer.transport.get_write_buffer_size() == 0)  # type: ignore[union-attr]
    main.line.tell_all("say", [200, ""])
    wait_for(lambda: first.heard[-1][1][0] == 200)
    numbers = [value[0] for _, value in first.heard]
    assert numbers == sorted(numbers)
    assert len(numbers) < 201, "else it tests nothing"
    assert first.lost == main.lost == []


def test_the_simulation_of_a_large_job_works() -> None:
    """`python tests/job/simulate_ranks.py` is what the README's figures come from."""
    program = Path(__file__).with_name("simulate_ranks.py")
    result = run([sys.executable, str(program), "--ranks", "300", "--seconds", "4"], timeout=60)
    assert result.code == 0 and result.out.splitlines()[-1].startswith("| 300 | 1.2 s |"), result.text
    assert result.err == ""
