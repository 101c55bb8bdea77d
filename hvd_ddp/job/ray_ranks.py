"""Start ranks on a Ray cluster: one actor a rank (job/ray_holder.py), on one CPU or one GPU of it.

Rank 0's card travels from its actor to the others, by way of this process: as safe as Ray's own connections are, and
no file system need be common for it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from hvd_ddp.errors import FAILED, FINISHED, HvdDDPError
from hvd_ddp.job import ray_holder
from hvd_ddp.job.launch import export, variables
from hvd_ddp.job.spawn import PASSED_ON

GRACE = 30.0  # seconds that the other ranks have to leave when one has failed
GLANCE = 0.2  # seconds after which signals are looked for


def spawn(num_ranks: int, arguments: Sequence[str], *, on: Literal["auto", "cpu", "cuda"], patience: float) -> int:
    """Run `python -m hvd_ddp <arguments>` as so many ranks in this folder; returns the first failing rank's exit code.

    `on`: what each rank has one of; auto: a GPU where the cluster has any. Raises HvdDDPError where Ray is not there
    or has no room within `patience` seconds.
    """
    ray = _connect()
    try:
        holders, hosts = _place(ray, num_ranks, _resource(ray, on), patience)
        came: list[int] = []
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: came.append(number))
        _start(ray, holders, hosts, arguments)
        return _follow(ray, holders, [f"rank {rank} on {host}" for rank, (_, host) in enumerate(hosts)], came)
    finally:
        ray.shutdown()


def _connect() -> Any:
    """Ray, connected to the cluster of RAY_ADDRESS, to the one that runs on this machine, or to a new one on it."""
    export({"RAY_USAGE_STATS_ENABLED": "0"}, over_the_users=False)  # nobody asked for its reports to its makers
    try:
        import ray
    except ImportError as error:
        raise HvdDDPError("--on ray: Ray is not installed in this Python. Run `pip install ray`.") from error
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        words = " ".join(str(error).split())
        raise HvdDDPError(
            f"Ray's cluster can't be joined: {words}. See `ray status`, RAY_ADDRESS, and RAY_AUTH_MODE."
        ) from error
    return ray


def _resource(ray: Any, on: str) -> str:
    there = ray.cluster_resources().get("GPU", 0) >= 1
    return "GPU" if on == "cuda" or (on == "auto" and there) else "CPU"


def _place(ray: Any, num_ranks: int, resource: str, patience: float) -> tuple[list[Any], list[tuple[str, str]]]:
    """An actor for each rank, those of one node in a row, and (Ray's name, host name) of the node of each."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{resource: 1}] * num_ranks)  # all or none
    until = time.monotonic() + patience
    while not group.wait(1):
        if time.monotonic() > until:
            there = ray.cluster_resources().get(resource, 0)
            raise HvdDDPError(
                f"-n is `{num_ranks}`, and Ray had no room for so many ranks of one {resource} within --start-timeout "
                f"(it has `{there:g}` in all): nothing was started. Start fewer, or give Ray more (`ray status`)."
            )
    ray.cloudpickle.register_pickle_by_value(ray_holder)
    actor = ray.remote(ray_holder.Holder)
    holders = [
        actor.options(
            num_cpus=int(resource == "CPU"),
            num_gpus=int(resource == "GPU"),
            max_concurrency=4,  # one waits in `listen`, one in `take_card`
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(num_ranks)
    ]
    nodes = ray.get([holder.node.remote() for holder in holders])
    first = {node: nodes.index(node) for node in nodes}
    order = sorted(range(num_ranks), key=lambda index: first[nodes[index]])  # a stable sort
    return [holders[index] for index in order], [nodes[index] for index in order]


def _start(ray: Any, holders: list[Any], nodes: list[tuple[str, str]], arguments: Sequence[str]) -> None:
    """Tell each rank who it is. Raises HvdDDPError where one can't start."""
    job = uuid.uuid4().hex
    started = []
    for rank, (holder, node) in enumerate(zip(holders, nodes, strict=True)):
        facts = {
            "HVD_DDP_RAY_RANK": str(rank),
            "HVD_DDP_RAY_SIZE": str(len(nodes)),
            "HVD_DDP_RAY_LOCAL_RANK": str(nodes[:rank].count(node)),
            "HVD_DDP_RAY_LOCAL_SIZE": str(nodes.count(node)),
            "HVD_DDP_RAY_JOB": job,
            **variables("PYTHONPATH"),
        }
        started.append(holder.start.remote(["-m", "hvd_ddp", *arguments], facts, os.getcwd()))
    for (_, host), problem in zip(nodes, ray.get(started), strict=True):
        if problem is not None:
            raise HvdDDPError(f"On {host} {problem}: no rank can run there. Start in a folder that all nodes have.")


def _follow(ray: Any, holders: list[Any], names: list[str], came: list[int]) -> int:
    """Hand on what ranks say, the card and the signals that `came` here, until all ranks have ended."""
    listening = {holder.listen.remote(): rank for rank, holder in enumerate(holders)}
    errands, codes, until = [holders[0].take_card.remote()], list[int](), math.inf
    while listening and time.monotonic() < until:
        ready, _ = ray.wait([*listening, *errands], timeout=GLANCE)
        while came:
            number = came.pop(0)
            errands += [holders[rank].signal.remote(number) for rank in listening.values()]
        for done in ready:
            if done not in listening:
                errands.remove(done)
                card = _answer(ray, done)
                errands += [holder.put_card.remote(card) for holder in holders[1:]] if card else []
                continue
            rank = listening.pop(done)
            code = _say(_answer(ray, done), names[rank])
            if code is None:
                listening[holders[rank].listen.remote()] = rank
            else:
                codes.append(code)
                until = min(until, time.monotonic() + GRACE) if code else until
    for rank in listening.values():
        _say((b"", f"hvd_ddp: {names[rank]} was still running {GRACE:g} s after another failed\n".encode(), 1), "")
    return next((code if code > 0 else FAILED for code in codes if code), FINISHED)


def _answer(ray: Any, done: Any) -> Any:
    """What an actor's method returned; None where the actor is gone."""
    with contextlib.suppress(ray.exceptions.RayError):
        return ray.get(done)
    return None


def _say(said: tuple[bytes, bytes, int | None] | None, name: str) -> int | None:
    """Write what a rank said; its exit code, once it has one."""
    lost = f"hvd_ddp: {name} is gone: its Ray actor died, or its node (see `ray status`)\n".encode()
    out, err, code = (b"", lost, FAILED) if said is None else said
    for stream, words in ((sys.stdout, out), (sys.stderr, err)):
        stream.buffer.write(words)
        stream.flush()
    return code
