"""Where do we meet: real sockets on loopback, ranks as threads (and once as processes), each with a hard time limit."""

import hmac
import json
import os
import queue
import resource
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from launchers import ROOT, command, environment, run

from hvd_ddp.backends.horovod_gloo import GlooServer
from hvd_ddp.errors import HvdDDPError, RankFailedError, RankZeroMissingError
from hvd_ddp.job import handshake, rendezvous
from hvd_ddp.job.channels import FileChannel
from hvd_ddp.job.launch import Launch
from hvd_ddp.job.network import serve_store
from hvd_ddp.job.rendezvous import Meeting, meet

HOST = socket.gethostname()
LIMIT = 20.0  # seconds after which a rank that still waits is a failure
PLENTY = 8.0  # start_timeout of ranks that are to meet


class Ranks:
    """Ranks of one job, each a thread that calls `meet`."""

    def __init__(self, directory: Path, world_size: int, **facts: Any) -> None:
        self.directory, self.world_size = directory, world_size
        self.facts = {"launcher": "openmpi", "local_world_size": world_size, "job": "openmpi-42", "cores": 8, **facts}
        self._results: dict[int, queue.Queue[Any]] = {}

    def launch(self, rank: int, **facts: Any) -> Launch:
        return Launch(**({"rank": rank, "local_rank": rank, "world_size": self.world_size} | self.facts | facts))

    def start(self, *ranks: int, start_timeout: float = PLENTY, error: str | None = None, **facts: Any) -> "Ranks":
        for rank in ranks:
            result: queue.Queue[Any] = queue.Queue()
            self._results[rank] = result
            launch = self.launch(rank, **facts)

            def work(launch: Launch = launch, result: queue.Queue[Any] = result) -> None:
                try:
                    result.put(meet(launch, directory=self.directory, start_timeout=start_timeout, error=error))
                except BaseException as problem:
                    result.put(problem)

            threading.Thread(target=work, name=str(rank), daemon=True).start()
        return self

    def result(self, rank: int, limit: float = LIMIT) -> Meeting | BaseException:
        try:
            return self._results[rank].get(timeout=limit)
        except queue.Empty:
            raise AssertionError(f"rank {rank} still waits after {limit} s") from None

    def waits(self, rank: int) -> bool:
        return self._results[rank].empty()

    def meetings(self, limit: float = LIMIT) -> list[Meeting]:
        """Of all ranks that were started, all of which must have met."""
        found = [self.result(rank, limit) for rank in sorted(self._results)]
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return found  # type: ignore[return-value]

    def errors(self, limit: float = LIMIT) -> list[BaseException]:
        """Of all ranks that were started, none of which may have met."""
        found = [self.result(rank, limit) for rank in sorted(self._results)]
        assert all(isinstance(result, BaseException) for result in found), found
        return found  # type: ignore[return-value]

    @property
    def card_path(self) -> Path:
        return self.directory / ".rendezvous-openmpi-42"

    def card(self) -> dict[str, Any]:
        """Rank 0's card, as soon as it is there."""
        wait_for(self.card_path.exists)
        card: dict[str, Any] = json.loads(self.card_path.read_bytes())
        return card

    def door(self) -> tuple[str, int]:
        host, port = self.card()["addresses"][0]
        return host, port


def place(meeting: Meeting) -> tuple[str, int]:
    """Where the store is."""
    return meeting.store.host, meeting.store.port  # type: ignore[attr-defined]


def wait_for(condition: Callable[[], bool], limit: float = 10.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


@pytest.fixture
def two(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path / "runs", 2)


@pytest.fixture
def three(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path / "runs", 3)


def connect(door: tuple[str, int]) -> tuple[socket.socket, bytes]:
    """A connection to rank 0 and its nonce."""
    connection = socket.create_connection(door, timeout=5)
    greeting, size = b"", handshake.GREETING
    while len(greeting) < size:
        greeting += connection.recv(size - len(greeting))
    return connection, greeting[: handshake.NONCE]


def hello(token: bytes, nonce: bytes, **facts: Any) -> bytes:
    """What a peer with this token says."""
    said = {"rank": 1, "world_size": 2, "host": "elsewhere", "process": [1, 2.0], "node_rank": None, "cores": 1,
            "error": None} | facts  # fmt: skip
    return sealed(token, nonce, json.dumps(said).encode())


def sealed(token: bytes, nonce: bytes, body: bytes) -> bytes:
    return hmac.digest(token, nonce.join([b"hello", body]), "sha256") + struct.pack("!I", len(body)) + body


def is_turned_away(connection: socket.socket, limit: float = 5.0) -> bool:
    """Closed by rank 0, which tells it nothing."""
    connection.settimeout(limit)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


# They meet


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("first", ["main", "others"])
def test_ranks_meet(world_size: int, first: str, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "runs", world_size)
    if first == "main":
        ranks.start(0)
        ranks.card()
        ranks.start(*range(1, world_size))
    else:
        ranks.start(*range(1, world_size))
        time.sleep(0.3)
        ranks.start(0)
    meetings = ranks.meetings()
    for rank, meeting in enumerate(meetings):
        launch = meeting.launch
        assert launch == replace(ranks.launch(rank), hosts=(HOST,) * world_size, node_rank=0)
        assert (meeting.address, meeting.interface) == ("127.0.0.1", "lo")
        assert meeting.cores == 8 // world_size
        assert launch.nodes == [HOST]
    meetings[0].store.set("fact", "from rank 0")
    for meeting in meetings[1:]:
        assert meeting.store.get("fact") == b"from rank 0"
    assert [meeting.store.add("count", 1) for meeting in meetings] == [*range(1, world_size + 1)]
    assert len({place(meeting) for meeting in meetings}) == 1


def test_one_process_needs_nobody(tmp_path: Path) -> None:
    meeting = meet(Launch(cores=5), directory=tmp_path / "runs", start_timeout=0.0)
    assert (meeting.launch.hosts, meeting.launch.local_world_size, meeting.cores) == ((HOST,), 1, 5)
    meeting.store.set("a", "b")
    assert meeting.store.get("a") == b"b"
    assert not (tmp_path / "runs").exists()
    with pytest.raises(HvdDDPError, match="no good"):
        meet(Launch(), directory=tmp_path, start_timeout=0.0, error="no good")


def test_the_smallest_share_of_cores_counts(two: Ranks) -> None:
    """Where the ranks of a node were told different numbers: they must have as many threads."""
    two.start(0, cores=6).start(1, cores=4)
    assert [meeting.cores for meeting in two.meetings()] == [2, 2]
    assert Launch(cores=1).cores == 1


def test_more_ranks_than_cores(three: Ranks) -> None:
    three.start(0, 1, 2, cores=2)
    assert [meeting.cores for meeting in three.meetings()] == [1, 1, 1]


def test_two_jobs_in_one_directory_do_not_mix(tmp_path: Path) -> None:
    one, other = Ranks(tmp_path, 2), Ranks(tmp_path, 2, job="openmpi-43")
    one.start(1)
    other.start(1)
    time.sleep(0.2)
    one.start(0)
    other.start(0)
    first, second = one.meetings(), other.meetings()
    assert place(first[0]) == place(first[1]) != place(second[0])
    assert place(second[0]) == place(second[1])


@pytest.mark.parametrize("name", ["openmpi-prterun-node1-19871@1", "flux-ƒd6pySYjTR", "a/../../b", "", "x" * 150])
def test_any_name_of_a_job_is_a_file_in_the_directory(name: str, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "deep" / "runs", 2, job=name)
    ranks.start(0)
    wait_for(lambda: len(list(ranks.directory.glob(".rendezvous-*"))) == 1)
    assert [path.parent for path in tmp_path.rglob("*") if path.is_file()] == [ranks.directory]
    ranks.start(1)
    ranks.meetings()


def test_real_processes_meet(tmp_path: Path) -> None:
    program = tmp_path / "meets.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from hvd_ddp.job.launch import detect\nfrom hvd_ddp.job.rendezvous import meet\n"
        "meeting = meet(detect(), directory=Path(sys.argv[1]), start_timeout=40)\n"
        "meeting.store.add('here', 1)\n"
        "while meeting.store.add('here', 0) < meeting.launch.world_size: pass\n"
        "said = f'{meeting.launch.rank} {meeting.launch.hosts} {meeting.address}'\n"
        "(Path(sys.argv[2]) / str(meeting.launch.rank)).write_text(said)\n"
        "meeting.store.add('leaving', 1)\n"
        "while meeting.launch.rank == 0 and meeting.store.add('leaving', 0) < 2: pass\n"
    )
    (tmp_path / "said").mkdir()
    line = [str(program), str(tmp_path / "runs"), str(tmp_path / "said")]
    result = run(command("mpiexec.mpich", 2, line), timeout=80)
    assert result.code == 0, result.text
    said = [(tmp_path / "said" / str(rank)).read_text() for rank in range(2)]
    assert said == [f"{rank} {(HOST, HOST)} 127.0.0.1" for rank in range(2)]
    assert not (tmp_path / "runs").exists()


# Who is missing


def test_a_missing_rank_is_named(three: Ranks) -> None:
    began = time.monotonic()
    three.start(0, 1, start_timeout=2.0)
    errors = three.errors(6.0)
    assert 1.9 < time.monotonic() - began < 5.0
    for error in errors:
        assert isinstance(error, RankFailedError)
        assert error.exit_code == 1
        assert "Of 3 ranks 1 did not come" in str(error)
        assert ": 2. " in str(error), str(error)
    assert not three.directory.exists()


def test_a_missing_rank_is_named_with_its_host(three: Ranks) -> None:
    three.start(0, 2, start_timeout=1.0, hosts=("node1", "node7", "node1"))
    for error in three.errors(6.0):
        assert "1 (node7)" in str(error)
        assert "node1" not in str(error)


def test_many_missing_ranks_are_not_a_wall_of_text(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 1000).start(0, start_timeout=0.5)
    text = str(ranks.errors(6.0)[0])
    assert "Of 1000 ranks 999 did not come" in text
    assert "and 979 more" in text
    assert len(text) < 500


def test_rank_0_is_missing(three: Ranks) -> None:
    three.start(1, 2, start_timeout=1.0)
    for rank, error in zip((1, 2), three.errors(6.0), strict=True):
        assert isinstance(error, RankZeroMissingError)
        assert f"this is rank {rank} on {HOST}" in str(error)
        assert not error.everywhere, "rank 0, which would say it for all, is not there"
    assert not three.directory.exists()


# Strangers


def wrong_token(card: dict[str, Any], nonce: bytes) -> bytes:
    return hello(b"\0" * 32, nonce)


def replayed(card: dict[str, Any], nonce: bytes) -> bytes:
    return hello(bytes.fromhex(card["token"]), b"\0" * handshake.NONCE)  # right for another connection


def garbage(card: dict[str, Any], nonce: bytes) -> bytes:
    return os.urandom(handshake.MAC) + struct.pack("!I", 64) + os.urandom(64)


def http(card: dict[str, Any], nonce: bytes) -> bytes:
    return b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: a scanner of the site\r\n\r\n"


def oversized(card: dict[str, Any], nonce: bytes) -> bytes:
    return b"\0" * handshake.MAC + struct.pack("!I", 0xFFFFFFFF) + b"x" * 1000


def oversized_with_token(card: dict[str, Any], nonce: bytes) -> bytes:
    return sealed(bytes.fromhex(card["token"]), nonce, b" " * (handshake.LARGEST_HELLO + 1))


def no_json(card: dict[str, Any], nonce: bytes) -> bytes:
    return sealed(bytes.fromhex(card["token"]), nonce, b"\xff\xfe{")


def a_list(card: dict[str, Any], nonce: bytes) -> bytes:
    return sealed(bytes.fromhex(card["token"]), nonce, b"[1, 2]")


def no_rank(card: dict[str, Any], nonce: bytes) -> bytes:
    return sealed(bytes.fromhex(card["token"]), nonce, b'{"world_size": 2}')


def rank_0(card: dict[str, Any], nonce: bytes) -> bytes:
    return hello(bytes.fromhex(card["token"]), nonce, rank=0)


def negative(card: dict[str, Any], nonce: bytes) -> bytes:
    return hello(bytes.fromhex(card["token"]), nonce, rank=-1)


STRANGERS = [wrong_token, replayed, garbage, http, oversized, oversized_with_token, no_json, a_list, no_rank, rank_0,
             negative]  # fmt: skip


@pytest.mark.parametrize("says", STRANGERS, ids=lambda says: says.__name__)
def test_a_stranger_is_turned_away_and_the_others_meet(
    says: Callable[[dict[str, Any], bytes], bytes], two: Ranks
) -> None:
    two.start(0)
    connection, nonce = connect(two.door())
    connection.sendall(says(two.card(), nonce))
    assert is_turned_away(connection)
    assert two.waits(0)
    two.start(1)
    assert [meeting.launch.hosts for meeting in two.meetings()] == [(HOST, HOST)] * 2


def test_the_right_words_are_let_in(two: Ranks) -> None:
    """Else all of the tests above pass for the wrong reason."""
    two.start(0)
    connection, nonce = connect(two.door())
    connection.sendall(hello(bytes.fromhex(two.card()["token"]), nonce))
    assert two.meetings()[0].launch.hosts == (HOST, "elsewhere")
    answer = connection.recv(1 << 16)
    body = answer[handshake.MAC + handshake.LENGTH :]
    token = bytes.fromhex(json.loads(two.card_path.read_bytes())["token"]) if two.card_path.exists() else None
    assert token is None, "the card is gone when all have come"
    assert json.loads(body)["store"][0] == "127.0.0.1"


def test_a_silent_connection_holds_nobody_up(two: Ranks) -> None:
    two.start(0)
    silent = [socket.create_connection(two.door(), timeout=5) for _ in range(20)]
    half, nonce = connect(two.door())
    half.sendall(hello(bytes.fromhex(two.card()["token"]), nonce)[:40])
    began = time.monotonic()
    two.start(1)
    two.meetings()
    assert time.monotonic() - began < 3.0
    for connection in silent:
        connection.close()


def test_a_silent_connection_is_closed_in_the_end(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE", 0.5)
    two.start(0)
    silent, _ = connect(two.door())
    dripping, nonce = connect(two.door())
    text = hello(bytes.fromhex(two.card()["token"]), nonce)
    began = time.monotonic()
    with pytest.raises(OSError):  # the right words, but at a pace at which they would take for ever
        for byte in text:
            dripping.sendall(bytes([byte]))
            time.sleep(0.05)
            assert time.monotonic() - began < 5.0, "it is still listened to"
    assert is_turned_away(silent, 2.0)
    assert two.waits(0)
    two.start(1)
    two.meetings()


def test_more_connections_than_files_may_be_open(tmp_path: Path) -> None:
    """Who only connects, and often, must not end the listening."""
    program = (
        "import resource, sys, threading, time, torch\nfrom pathlib import Path\n"  # torch first, as a backend has it
        "from hvd_ddp.job.launch import Launch\nfrom hvd_ddp.job.rendezvous import meet\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))\n"
        "launch = Launch(launcher='openmpi', rank=0, world_size=2, local_world_size=2, job='openmpi-42')\n"
        "meet(launch, directory=Path(sys.argv[1]), start_timeout=25)\nprint('MET', flush=True)\ntime.sleep(2)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        ranks = Ranks(tmp_path, 2)
        wait_for(ranks.card_path.exists, 30)
        crowd = [socket.create_connection(ranks.door(), timeout=5) for _ in range(100)]
        time.sleep(0.5)
        for connection in crowd:
            connection.close()
        ranks.start(1)
        ranks.meetings()
        assert process.stdout is not None
        assert process.stdout.readline() == "MET\n"
    finally:
        process.kill()
        process.wait()


def test_a_second_rank_1_does_not_displace_the_first(three: Ranks) -> None:
    three.start(0)
    card = three.card()
    three.start(1)
    waiting, nonce = connect(three.door())
    time.sleep(0.5)  # the first one is in
    waiting.sendall(hello(bytes.fromhex(card["token"]), nonce, world_size=3, rank=1))
    assert is_turned_away(waiting)
    three.start(2)
    for meeting in three.meetings():
        assert meeting.launch.hosts == (HOST,) * 3


# Stale cards


@pytest.fixture
def servers() -> Iterator[list[socket.socket]]:
    opened: list[socket.socket] = []
    yield opened
    for server in opened:
        server.close()


def write_card(ranks: Ranks, port: int) -> None:
    ranks.directory.mkdir(exist_ok=True)
    ranks.card_path.write_text(json.dumps({"addresses": [["127.0.0.1", port]], "token": "ab" * 32}))


def serve(servers: list[socket.socket], greet: bytes | None) -> int:
    """A port that another program has taken since: it says `greet` to everyone and then waits; None: not a word."""
    server = socket.create_server(("127.0.0.1", 0))
    servers.append(server)

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            servers.append(connection)
            if greet is not None:
                connection.sendall(greet)

    threading.Thread(target=accept, daemon=True).start()
    return int(server.getsockname()[1])


def test_a_stale_card_whose_port_is_closed(two: Ranks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    write_card(two, port)
    two.start(1)
    time.sleep(0.3)
    two.start(0)
    two.meetings()


def test_a_stale_card_whose_port_is_another_jobs(two: Ranks, tmp_path: Path) -> None:
    """A living rank 0 of another job: it does not take our rank, nor we its store."""
    other = Ranks(tmp_path / "other", 2).start(0)
    write_card(two, other.door()[1])
    two.start(1)
    time.sleep(0.3)
    assert other.waits(0)
    two.start(0)
    ours = two.meetings()
    other.start(1)
    theirs = other.meetings()
    assert place(ours[0]) == place(ours[1]) != place(theirs[0])


GREETINGS = [None, b"SSH-2.0-OpenSSH_9.2p1\r\n", b"220 mail.example.org ESMTP Postfix, fifty bytes\r\n.", b"x" * 5000]


@pytest.mark.parametrize("greet", GREETINGS, ids=["silent", "short", "fifty", "long"])
def test_a_stale_card_whose_port_is_another_programs(
    greet: bytes | None, two: Ranks, servers: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers in a way that no rank 0 does, or never: look again, long before the start times out."""
    monkeypatch.setattr(handshake, "HANDSHAKE", 1.0)
    write_card(two, serve(servers, greet))
    two.start(1, start_timeout=60.0)
    time.sleep(0.3)
    two.start(0, start_timeout=60.0)
    two.meetings(10.0)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\x00", b"[]", b"{}", b'{"addresses": [["127.0.0.1", 1]]}', b'{"addresses": 7, "token": "zz"}'],
)
def test_a_card_that_is_none(content: bytes, two: Ranks) -> None:
    """Of a disk that was full, or of another version."""
    two.directory.mkdir()
    two.card_path.write_bytes(content)
    two.start(1)
    time.sleep(0.3)
    two.start(0)
    two.meetings()


def test_what_is_left_of_a_killed_rank_0_with_our_pid(two: Ranks) -> None:
    """In containers every rank 0 has the same process id."""
    two.directory.mkdir()
    (two.directory / f"{two.card_path.name}.{os.getpid()}").write_text("cut sho")
    two.start(0, 1)
    two.meetings()


# What they disagree about


def test_world_sizes_that_differ(three: Ranks) -> None:
    three.start(0, 2).start(1, world_size=4)
    for error in three.errors():
        assert type(error) is HvdDDPError
        assert "rank 1 was told a world size of `4`, rank 0 of `3`" in str(error)
    assert not three.directory.exists()


def test_a_rank_beyond_rank_0s_world_size_is_told_so(two: Ranks) -> None:
    """Rank 2 of three, where rank 0 was told that there are two."""
    two.start(0)
    two.card()
    two.start(2, world_size=3)
    time.sleep(0.5)
    two.start(1)
    found = [two.result(rank, 8.0) for rank in (0, 1, 2)]
    for error in found:
        assert type(error) is HvdDDPError, found
        assert "`3`" in str(error)
        assert "`2`" in str(error)


@pytest.mark.parametrize("unwell", [0, 1, 2])
def test_what_one_rank_found_wrong_reaches_all(unwell: int, three: Ranks) -> None:
    well = [rank for rank in range(3) if rank != unwell]
    three.start(*well).start(unwell, error="--device is `cuda`, but torch sees no GPU here.")
    for error in three.errors():
        assert type(error) is HvdDDPError
        assert str(error).startswith("--device is `cuda`, but torch sees no GPU here.")
        assert f"rank {unwell} on {HOST}" in str(error)
    assert not three.directory.exists()


@pytest.mark.parametrize("unwell", [0, 1])
def test_it_reaches_also_a_rank_that_comes_later(unwell: int, three: Ranks) -> None:
    """Ranks import torch from a slow file system: seconds lie between them."""
    three.start(*range(2)) if unwell == 2 else three.start(1 - unwell)
    three.start(unwell, error="no GPU here.")
    time.sleep(1.5)
    three.start(2)
    for error in three.errors(8.0):
        assert type(error) is HvdDDPError, error
        assert "no GPU here." in str(error)


def test_what_all_found_wrong_is_said_without_a_rank(three: Ranks) -> None:
    three.start(0, 1, 2, error="Horovod is not installed.")
    assert [str(error) for error in three.errors()] == ["Horovod is not installed."] * 3


def test_an_unwell_rank_0_does_not_wait_for_long(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "LAST_WORDS", 1.0)
    began = time.monotonic()
    two.start(0, start_timeout=60.0, error="no good")
    assert "no good" in str(two.errors(5.0)[0])
    assert time.monotonic() - began < 4.0


# What stays behind, and what is open to whom


def test_the_card_is_the_owners_alone_and_gone_afterwards(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        two.start(0)
        card = two.card()
        status = two.card_path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_uid == os.getuid()
        assert len(bytes.fromhex(card["token"])) == 32
        two.start(1)
        two.meetings()
    finally:
        os.umask(before)
    assert not two.directory.exists(), "the directory was made for the card"


def test_directories_that_were_there_stay(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "a" / "b" / "c", 2)
    (tmp_path / "a").mkdir()
    ranks.start(0, 1)
    ranks.meetings()
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


def test_what_others_put_into_the_directory_meanwhile_stays(two: Ranks) -> None:
    two.start(0)
    two.card()
    (two.directory / "mine").write_text("x")
    two.start(1)
    two.meetings()
    assert [path.name for path in two.directory.iterdir()] == ["mine"]


@pytest.mark.parametrize("kind", ["a file in its place", "below a file", "/proc/none", "/dev/null/x"])
def test_a_directory_that_can_not_be_written(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    places = {"a file in its place": tmp_path / "file", "below a file": tmp_path / "file" / "runs"}
    directory = places.get(kind, Path(kind))
    ranks = Ranks(directory, 2).start(0)
    error = ranks.errors(5.0)[0]
    assert type(error) is HvdDDPError
    assert f"`{directory}` can't be written" in str(error)
    assert "--run-dir" in str(error)
    assert (tmp_path / "file").read_text() == "mine"


def listening() -> set[tuple[str, int]]:
    """Addresses on which this process listens."""
    found = psutil.Process().net_connections(kind="tcp")
    return {(entry.laddr.ip, entry.laddr.port) for entry in found if entry.status == psutil.CONN_LISTEN}


def test_a_job_of_one_node_listens_on_loopback_alone(two: Ranks) -> None:
    before = listening()
    two.start(0)
    two.card()
    waiting = listening() - before
    assert {host for host, _ in waiting} == {"127.0.0.1"}, waiting
    assert two.door() in waiting
    two.start(1)
    meetings = two.meetings()
    store = listening() - before
    assert {host for host, _ in store} == {"127.0.0.1"}, store
    assert place(meetings[0]) in store
    assert not waiting & store, "the door is shut when all have come"


def test_a_job_of_more_nodes_listens_on_addresses_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never on all interfaces, and the store only where the peers came from. 127.0.0.2 stands for the network."""
    monkeypatch.setattr(rendezvous, "addresses", lambda wanted: ["127.0.0.1", "127.0.0.2"])
    monkeypatch.setattr(rendezvous, "interface_of", lambda address: f"of {address}")
    ranks = Ranks(tmp_path, 3, local_world_size=1)
    before = listening()
    ranks.start(0)
    card = ranks.card()
    assert {host for host, _ in listening() - before} == {"127.0.0.1", "127.0.0.2"}
    second = [door for door in card["addresses"] if door[0] == "127.0.0.2"]
    ranks.card_path.write_text(json.dumps(card | {"addresses": second}))  # what the others can reach
    ranks.start(1, 2)
    meetings = ranks.meetings()
    assert {place(meeting)[0] for meeting in meetings} == {"127.0.0.2"}
    assert meetings[0].address == "127.0.0.2"
    assert {host for host, _ in listening() - before} == {"127.0.0.2"}


def meet_by(doors: dict[int, str], hosts: list[str], directory: Path, patch: pytest.MonkeyPatch) -> list[Meeting]:
    """Meetings of ranks that are on these hosts and reach rank 0 by those of its addresses.

    127.0.0.1 and 127.0.0.2 stand for two networks of rank 0's host.
    """
    real = handshake.visit

    def visit(cards: list[tuple[str, int]], token: bytes, hello: dict[str, Any], deadline: float) -> Any:
        return real([card for card in cards if card[0] == doors[hello["rank"]]], token, hello, deadline)

    patch.setattr(rendezvous, "visit", visit)
    patch.setattr(rendezvous, "addresses", lambda wanted: ["127.0.0.1", "127.0.0.2"])
    patch.setattr(rendezvous, "interface_of", lambda address: f"of {address}")
    patch.setattr(socket, "gethostname", lambda: hosts[int(threading.current_thread().name)])
    ranks = Ranks(directory, len(hosts), local_world_size=None, node_rank=None).start(*range(len(hosts)))
    return ranks.meetings()


@pytest.mark.parametrize("good", ["127.0.0.1", "127.0.0.2"])
def test_the_store_is_where_ranks_of_other_hosts_came(
    good: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks beside rank 0 reach any of its addresses, those of a cable that leads nowhere as well."""
    bad = "127.0.0.1" if good == "127.0.0.2" else "127.0.0.2"
    doors = {1: bad, 2: bad, 3: bad, 4: good, 5: good}
    meetings = meet_by(doors, ["a", "a", "a", "a", "b", "b"], tmp_path, monkeypatch)
    assert {place(meeting)[0] for meeting in meetings} == {good}
    for meeting in meetings[:4]:  # by whatever door they came
        assert (meeting.address, meeting.interface) == (good, f"of {good}")
    assert [meeting.launch.node_rank for meeting in meetings] == [0, 0, 0, 0, 1, 1]
    assert [meeting.launch.local_world_size for meeting in meetings] == [4, 4, 4, 4, 2, 2]


def test_the_store_is_where_most_of_them_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doors = {1: "127.0.0.1", 2: "127.0.0.2", 3: "127.0.0.1", 4: "127.0.0.2", 5: "127.0.0.2"}
    meetings = meet_by(doors, ["a", "b", "c", "d", "e", "f"], tmp_path, monkeypatch)
    assert {place(meeting)[0] for meeting in meetings} == {"127.0.0.2"}


def test_ranks_of_one_host_agree_on_one_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the launcher does not say that they are all there (Flux)."""
    doors = {1: "127.0.0.1", 2: "127.0.0.2", 3: "127.0.0.2"}
    meetings = meet_by(doors, ["a"] * 4, tmp_path, monkeypatch)
    assert [(meeting.address, place(meeting)[0]) for meeting in meetings] == [("127.0.0.2", "127.0.0.2")] * 4


def test_the_connections_stay_open_for_the_line(three: Ranks) -> None:
    three.start(0, 1, 2)
    main, first, second = three.meetings()
    assert sorted(main.connections) == [1, 2]
    for rank, meeting in ((1, first), (2, second)):
        assert list(meeting.connections) == [0]
        here, there = main.connections[rank], meeting.connections[0]
        assert (here.token, here.nonce) == (there.token, there.nonce)
        assert here.seal(b"line", b"x") == there.seal(b"line", b"x")
        here.socket.setblocking(True)
        here.socket.sendall(b"for %d" % rank)
        assert there.socket.recv(9) == b"for %d" % rank
    assert main.connections[1].nonce != main.connections[2].nonce
    assert main.processes == first.processes == second.processes
    assert [number for number, _ in main.processes] == [os.getpid()] * 3


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"), [(256, 9999, 9024), (256, 2000, 2000), (9500, 9999, 9500), (1500, 1500, 1500)]
)
def test_many_ranks_need_many_files(soft: int, hard: int, wanted: int) -> None:
    """Rank 0 holds two connections a rank, and shells often allow 1,024 in all."""
    program = (
        "import resource, sys\nfrom hvd_ddp.job.handshake import Guests\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "Guests(b'token', 2000)\nprint(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip("this machine allows fewer")
    result = run([sys.executable, "-c", program], timeout=30)
    assert result.out.split() == [str(wanted), str(hard)], result.text


def test_ranks_of_nproc_listen_on_loopback_alone(tmp_path: Path) -> None:
    """The launcher as well: what comes in there is trusted (torch's c10d rendezvous unpickles it)."""
    program = ["-m", "hvd_ddp", "--model", "factories:Small", "--threads", "1", "--max-steps", "1000000"]
    program += ["--eval-every", "100000", "--save-every", "100000", "--run-dir", str(tmp_path / "run")]
    paths = f"{ROOT}:{ROOT / 'tests'}"
    job = subprocess.Popen(
        command("--nproc", 2, program),
        env=environment(PYTHONPATH=paths),
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: b'"train"' in read(tmp_path / "run" / "metrics.jsonl"), 60)
        family = [psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)]
        assert len(family) >= 3
        found = {
            (" ".join(process.cmdline()[:4]), entry.laddr.ip)
            for process in family
            for entry in process.net_connections(kind="inet")
            if entry.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
        }
        assert found, "else it tests nothing: the store listens"
        assert {place for place in found if place[1] != "127.0.0.1"} == set()
    finally:
        for process in psutil.Process(job.pid).children(recursive=True):
            process.kill()
        job.kill()
        job.wait()


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


# The other ways that a card travels


def test_over_torchruns_store(tmp_path: Path) -> None:
    store, port = serve_store("127.0.0.1")
    ranks = Ranks(tmp_path / "runs", 3, launcher="torchrun", torchrun_store=("127.0.0.1", port, True))
    ranks.start(1, 2)
    time.sleep(0.2)
    ranks.start(0)
    ranks.meetings()
    assert not (tmp_path / "runs").exists()
    assert not store.check(["hvd_ddp/card/openmpi-42"])


def test_over_horovodruns_server(tmp_path: Path) -> None:
    server = GlooServer("127.0.0.1")  # speaks as horovodrun's does
    try:
        facts = {"launcher": "horovodrun", "horovodrun_store": ("127.0.0.1", server.port)}
        ranks = Ranks(tmp_path / "runs", 3, **facts).start(1, 2)
        time.sleep(0.2)
        ranks.start(0)
        ranks.meetings()
        assert not (tmp_path / "runs").exists()
        assert all(not value for value in server.values.values()), "the token stays with nobody"
    finally:
        server.stop()


@pytest.mark.parametrize("rank", [0, 1])
def test_horovodruns_server_is_gone(rank: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    facts = {"launcher": "horovodrun", "horovodrun_store": ("127.0.0.1", port)}
    error = Ranks(tmp_path, 2, **facts).start(rank, start_timeout=2.0).errors(8.0)[0]
    assert isinstance(error, HvdDDPError), repr(error)


def test_a_card_file_is_not_read_through_a_strangers_hands(two: Ranks) -> None:
    """In a directory where others may write, somebody else's card would send the ranks to somebody else's store."""
    if os.getuid() != 0:
        pytest.skip("only root can make a file of another owner")
    two.directory.mkdir()
    two.card_path.write_text(json.dumps({"addresses": [["127.0.0.1", 1]], "token": "ab" * 32}))
    os.chown(two.card_path, 65534, 65534)
    assert FileChannel(two.directory, "openmpi-42").card() is None
    two.start(1, 0)
    two.meetings()


def test_cards_of_dead_jobs_are_swept_up(tmp_path: Path) -> None:
    """After a week; other files stay."""
    for name, days in ((".rendezvous-old", 8), (".rendezvous-new", 6), ("results-old", 8)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - days * 86_400,) * 2)
    channel = FileChannel(tmp_path, "mine")
    channel.offer(b"{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".rendezvous-mine", ".rendezvous-new", "results-old"]
    channel.withdraw()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".rendezvous-new", "results-old"]
