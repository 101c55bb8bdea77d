"""How the ranks of one host share its cores, GPUs and memory: judged by rank 0 from what each rank tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hvd_ddp.doctor.check import Check, failure, ok, warning
from hvd_ddp.doctor.gathering import Gathering
from hvd_ddp.doctor.report import Report

SHARED_MEMORY, LEAST_SHARED_MEMORY = 64 << 20, 1 << 20  # bytes a rank

Facts = list[dict[str, Any]]  # one a rank of the host


def nodes(gathering: Gathering, reports: dict[int, Report]) -> list[Check]:
    """All hosts."""
    checks: list[Check] = []
    for host, ranks in gathering.hosts.items():
        here = [rank for rank in ranks if rank in reports and "cores" in reports[rank].facts]
        facts = [reports[rank].facts for rank in here]
        for judge in (_cores, _threads, _gpus, _shared_memory):
            checks += [replace(check, rank=here[0]) for check in judge(host, facts)] if here else []
    return checks


def _cores(host: str, facts: Facts) -> Iterator[Check]:
    cores = {core for fact in facts for core in fact["cores"]}
    least, share = min(len(fact["cores"]) for fact in facts), _share(facts)
    remedy = "Give each rank its own cores: mpirun --bind-to none, srun --cpus-per-task N; or start fewer ranks."
    if len(cores) < len(facts):
        yield warning("binding", f"{len(facts)} ranks of {host} have {len(cores)} core(s)", remedy)
    elif least < share:
        detail = f"on {host} a rank is bound to {least} core(s), where {len(facts)} rank(s) could use {share} each"
        yield warning("binding", detail, remedy)
    else:
        yield ok("binding", f"{len(facts)} rank(s) on {len(cores)} core(s), {least} or more for each")


def _threads(host: str, facts: Facts) -> Iterator[Check]:
    found, share, most = {fact["OMP_NUM_THREADS"] for fact in facts}, _share(facts), _cores_of_node(facts)
    remedy = f"export OMP_NUM_THREADS={share}. Torch's own threads hvd_ddp sets by itself (--threads)."
    each = max(int(value) if value.isdecimal() else most for value in found)
    if each * len(facts) <= most or (found == {""} and len(facts) == 1):
        yield ok("threads", f"OMP_NUM_THREADS={max(found) or 'unset'}; {len(facts)} rank(s), {most} core(s)")
    else:
        what = "is unset" if found == {""} else f"is {max(found)}"
        detail = (
            f"OMP_NUM_THREADS {what}: {len(facts)} rank(s) of {host} may start {each} threads each on {most} core(s)"
        )
        yield warning("threads", detail, remedy)


def _gpus(host: str, facts: Facts) -> Iterator[Check]:
    seen = min(fact.get("gpus", 0) for fact in facts)
    if 1 < seen < len(facts):  # 1: the scheduler shows each rank its own
        remedy = "Start at most as many ranks a node as it has GPUs."
        yield failure("cuda", f"{len(facts)} ranks of {host} see {seen} GPUs: two would share one", remedy)


def _shared_memory(host: str, facts: Facts) -> Iterator[Check]:
    free = [fact["shm"] for fact in facts if "shm" in fact]
    if not free:
        return
    detail = f"{min(free) / 2**20:,.0f} MiB free for {len(facts)} rank(s)"
    if min(free) >= SHARED_MEMORY * len(facts):
        yield ok("/dev/shm", detail)
        return
    say = failure if min(free) < LEAST_SHARED_MEMORY * len(facts) else warning
    remedy = "Enlarge it (mount -o remount,size=1G /dev/shm; containers: --shm-size=1g), or remove what fills it."
    yield say("/dev/shm", f"{detail} of {host}: MPI, NCCL and loader processes share data there", remedy)


def _cores_of_node(facts: Facts) -> int:
    return min(int(fact["cores_of_node"]) for fact in facts)


def _share(facts: Facts) -> int:
    return max(1, _cores_of_node(facts) // len(facts))
