"""What the heartbeat costs rank 0 of a large job: its own line and judge, and a process that plays all other ranks.

    python tests/job/simulate_ranks.py --ranks 4096

Every rank beats as in a real job, over a socket of its own, sealed with the job's token. After so many seconds one of
them hangs up, as a process that dies does; counted is until the last of the others knows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from hvd_ddp.job.handshake import Connection
from hvd_ddp.job.health import beat_interval
from hvd_ddp.job.judge import Judge
from hvd_ddp.job.line import Line, _Peer
from hvd_ddp.job.pulse import Place

TIMEOUT = 300.0
TOKEN = b"t" * 32


def others(ends: list[socket.socket], seconds: float, report: int) -> None:
    """All ranks but rank 0, in one process; rank 7 hangs up at the end. Writes when all know to `report`."""

    async def live(rank: int, end: socket.socket) -> float:
        peer = _Peer(Connection(end, TOKEN, b"%d" % rank), away=False)
        await peer.open()
        beating = asyncio.ensure_future(beat(rank, peer))
        try:
            while True:
                kind, _ = await peer.hear()
                if kind == "verdict":
                    peer.say("here", None)
                elif kind == "go":
                    return time.monotonic()
        except EOFError:
            return 0.0
        finally:
            beating.cancel()

    async def beat(rank: int, peer: _Peer) -> None:
        every, moves = beat_interval(len(ends) + 1, TIMEOUT), 0
        await asyncio.sleep(every * rank / len(ends))
        while True:
            moves += 17
            peer.say("beat", asdict(Place(moves, moves // 6, "averaging gradients")))
            await asyncio.sleep(every)

    async def all_() -> tuple[float, float]:
        tasks = [asyncio.ensure_future(live(rank, end)) for rank, end in enumerate(ends, 1)]
        await asyncio.sleep(seconds)
        died = time.monotonic()
        tasks[6].cancel()
        ends[6].close()
        known = await asyncio.gather(*tasks[:6], *tasks[7:])
        return max(known) - died, min(known)

    until, first = asyncio.run(all_())
    os.write(report, json.dumps({"seconds_until_all_know": until, "all_told": first > 0}).encode())


def simulate(num_ranks: int, seconds: float) -> dict[str, Any]:
    """Share of a core that rank 0's line takes, and the time from a death until all know."""
    need = 2 * num_ranks + 100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, need), hard), hard))
    pairs = [socket.socketpair() for _ in range(num_ranks - 1)]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for mine, _ in pairs:
            mine.close()
        try:
            others([theirs for _, theirs in pairs], seconds, writer)
        finally:
            os._exit(0)
    for _, theirs in pairs:
        theirs.close()
    os.close(writer)
    line = Line(0, {rank: Connection(mine, TOKEN, b"%d" % rank) for rank, (mine, _) in enumerate(pairs, 1)})
    launch: Any = SimpleNamespace(world_size=num_ranks, hosts=tuple(f"node{rank // 64}" for rank in range(num_ranks)))
    verdicts: list[Any] = []
    judge = Judge(launch, line, timeout=TIMEOUT, here=lambda: Place(1, 1, "forward"), speak=verdicts.append)
    line.on |= {
        "beat": lambda rank, place: judge.hear(rank, Place(**place)),
        "verdict": lambda *_: line.tell_main("here"),
        "go": lambda *_: None,
    }
    line.on_lost = judge.lost
    looks: list[float] = []

    def tick() -> None:
        began = time.thread_time()
        line.tell_all("beat", asdict(Place(len(looks), len(looks), "forward")))
        judge.look(time.monotonic())
        looks.append(time.thread_time() - began)

    line.on_beat = tick
    line.start(beat=beat_interval(num_ranks, TIMEOUT))
    time.sleep(min(seconds, beat_interval(num_ranks, TIMEOUT) + 1))  # the first round opens the connections
    began, used = time.monotonic(), time.process_time()
    time.sleep(max(0.1, seconds - beat_interval(num_ranks, TIMEOUT) - 3))
    share = (time.process_time() - used) / (time.monotonic() - began)
    with os.fdopen(reader, "rb") as pipe:
        answer = json.loads(pipe.read() or b"{}")
    os.waitpid(child, 0)
    line.close()
    return {"ranks": num_ranks, "beat_every": beat_interval(num_ranks, TIMEOUT), "share_of_a_core": share,
            "verdict": verdicts[0]["rank"] if verdicts else None, **answer}  # fmt: skip


def rows(arguments: list[str]) -> Iterator[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args(arguments)
    for num_ranks in options.ranks:
        yield simulate(num_ranks, options.seconds)


if __name__ == "__main__":
    print("| ranks | a beat every | share of rank 0's core | from a death until all know |\n|---|---|---|---|")
    for row in rows(sys.argv[1:]):
        assert row["verdict"] == 7 and row["all_told"], row
        print(
            f"| {row['ranks']:,} | {row['beat_every']:g} s | {100 * row['share_of_a_core']:.1f} % "
            f"| {row['seconds_until_all_know']:.2f} s |",
            flush=True,
        )
