"""Where do we meet: every rank shows the job's token to rank 0, which names who is missing and gives out the store.

Rank 0 listens on a free port. Its card (addresses, port, token) travels over the launcher's channel. A peer proves
that it knows the token (job/handshake.py), says who it is, and waits. When all have come, rank 0 answers each with the
facts of all ranks and the address of a key-value store that lives on a socket bound to the interface over which the
peers of other hosts came. The connections stay open for job/line.py.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_ddp.errors import HvdDDPError, RankFailedError, RankZeroMissingError
from hvd_ddp.job.channels import Channel, channel_for, read_card, write_card
from hvd_ddp.job.handshake import Connection, Guests, check_hello, hello_of, visit
from hvd_ddp.job.launch import Launch
from hvd_ddp.job.network import LOOPBACK, addresses, interface_of, listen, serve_store, source_address, store_client
from hvd_ddp.job.pulse import Pulse
from hvd_ddp.job.stop import Stop

if TYPE_CHECKING:
    from torch.distributed import Store

HEARD = 1.0  # seconds that rank 0 leaves the others to hear why it ends: srun kills who still reads when it has left


@dataclass
class Meeting:
    """The job as every rank knows it after the rendezvous, and what is done when it ends early."""

    launch: Launch  # complete: no field is None
    store: Store
    address: str  # of this rank on the network that the job uses
    interface: str
    cores: int  # that each rank of this node may use
    processes: list[tuple[int, float]]  # number and start of each rank's process, on its host
    connections: dict[int, Connection] = field(default_factory=dict)  # rank 0: to every other rank; others: to rank 0
    pulse: Pulse = field(default_factory=Pulse)
    stop: Stop = field(default_factory=Stop)
    farewells: list[Callable[[], None]] = field(default_factory=list)  # done when the job fails, on each rank
    lost_a_peer: Callable[[BaseException], bool] = lambda error: False  # whether another rank's end explains it
    write_record: Callable[[dict[str, Any]], bool] = lambda record: True  # False: another rank has written one
    write_stacks: Callable[[Callable[..., None]], None] = lambda dump: None


def meet(launch: Launch, *, directory: Path, start_timeout: float, error: str | None = None) -> Meeting:
    """Meet the other ranks of the job.

    `error` is what this rank found wrong before it came: then all ranks raise it as HvdDDPError. Raises
    RankFailedError with the ranks that are missing after `start_timeout` seconds.
    """
    hello = hello_of(launch, host=socket.gethostname(), error=error)
    if launch.world_size == 1:
        if error:
            raise HvdDDPError(error)
        from torch.distributed import HashStore

        return _meeting(launch, [hello], store=HashStore(), address=LOOPBACK, connections={})
    channel = channel_for(launch, directory)
    deadline = time.monotonic() + start_timeout
    if launch.rank == 0:
        return _host(launch, channel, hello=hello, deadline=deadline)
    return _join(launch, channel, hello=hello, deadline=deadline)


def _meeting(
    launch: Launch,
    peers: list[dict[str, Any]],
    *,
    store: Store,
    address: str,
    connections: dict[int, Connection],
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
    processes = [(int(peer["process"][0]), float(peer["process"][1])) for peer in peers]
    threads = max(1, cores // len(here))
    return Meeting(launch, store, address, interface_of(address), threads, processes, connections)


def _host(launch: Launch, channel: Channel, *, hello: dict[str, Any], deadline: float) -> Meeting:
    token = secrets.token_bytes(32)
    guests = Guests(token, launch.world_size)
    guests.hellos[0] = hello
    listeners = [listen(address) for address in _doors(launch, hello)]
    doors = [listener.getsockname()[:2] for listener in listeners]
    channel.offer(write_card(doors, token))
    try:
        missing = asyncio.run(guests.receive(listeners, deadline))
        channel.withdraw()
        peers = [guests.hellos.get(rank, {}) for rank in range(launch.world_size)]
        problem = _problem([*peers, *guests.misfits], missing, launch)
        if problem:
            guests.answer({"error": problem[0], "failed": problem[1]})
            time.sleep(HEARD)
            raise (RankFailedError if problem[1] else HvdDDPError)(problem[0])
        address = guests.address(hello["host"])
        store, port = serve_store(address)
        guests.answer({"peers": peers, "store": [address, port]})
        return _meeting(launch, peers, store=store, address=address, connections=guests.connections())
    except BaseException:
        guests.close()
        raise


def _doors(launch: Launch, hello: dict[str, Any]) -> list[str]:
    """Addresses for the others to come to; where the user's interfaces are not here, any, so that all hear of it."""
    if launch.local_world_size == launch.world_size:
        return [LOOPBACK]
    try:
        return addresses(launch.interfaces)
    except HvdDDPError as error:
        hello["error"] = hello["error"] or str(error)
        return addresses()


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


def _facts(message: dict[str, Any], launch: Launch) -> tuple[list[dict[str, Any]], tuple[str, int]]:
    """What all ranks said, and where the store is. Raises HvdDDPError for an answer that is none."""
    try:
        peers, (address, port) = [check_hello(peer) for peer in message["peers"]], message["store"]
        assert [peer["rank"] for peer in peers] == [*range(launch.world_size)]
        assert isinstance(address, str) and type(port) is int and 0 < port < 1 << 16
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise HvdDDPError(
            f"Rank 0 answers rank {launch.rank} what this version of hvd_ddp does not understand. Install the same one "
            "on each host."
        ) from error
    return peers, (address, port)


def _join(launch: Launch, channel: Channel, *, hello: dict[str, Any], deadline: float) -> Meeting:
    while time.monotonic() < deadline:
        card = read_card(channel.card())
        answer = visit(*card, hello, deadline) if card else None
        if answer is None:
            time.sleep(0.05)
            continue
        message, connection = answer
        if "error" in message:
            raise (RankFailedError if message.get("failed") else HvdDDPError)(str(message["error"]))
        peers, (address, port) = _facts(message, launch)
        return _meeting(
            launch,
            peers,
            store=store_client(address, port),
            # Of a rank beside rank 0 the connection may have come by any of the host's interfaces, dead ones as well.
            address=address if peers[launch.rank]["host"] == peers[0]["host"] else source_address(address, port),
            connections={0: connection},
        )
    where = f" ({launch.hosts[0]})" if launch.hosts else ""
    raise RankZeroMissingError(
        f"Rank 0{where} was not found before --start-timeout (this is rank {launch.rank} on {hello['host']}). See why "
        "it did not start (its log, its node), and whether all ranks see the same file system."
    )
