"""What only several ranks can tell: who is missing, what differs, clocks, files that all see."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hvd_ddp.doctor.check import Check, Patient, failure, ok, warning
from hvd_ddp.doctor.files import nearest
from hvd_ddp.doctor.gathering import Answers, Gathering
from hvd_ddp.doctor.report import Report, ranks_in_words

SEEN = 15.0  # seconds in which a new file must be seen elsewhere: NFS remembers for 3 to 60 that there was none
ASKED, PAUSE = 3, 0.2  # times that a clock is read, seconds between
SLOW_CLOCK, WRONG_CLOCK = 1.0, 10.0  # seconds
SHOWN = 8  # hosts that are named


def attendance(gathering: Gathering) -> list[Check]:
    """Who came."""
    size, hosts, known = gathering.launch.world_size, list(gathering.hosts), gathering.launch.hosts
    checks = [
        failure(
            "ranks",
            f"rank {stranger['rank']} on {stranger['host']} was told a world size of {stranger['world_size']}, rank 0 "
            f"of {size}: they are not of one job",
            "Start all ranks with one command; see that mpirun and the MPI of the job are one.",
        )
        for stranger in gathering.strangers
    ]
    if gathering.missing:
        on = sorted({known[rank] for rank in gathering.missing}) if known else []
        where = f" (on {_some(on)})" if on else ""
        detail = f"{len(gathering.missing)} of {size} did not come: {ranks_in_words(gathering.missing)}{where}"
        remedy = "See their own lines, or why they did not start. What follows is of the ranks that came."
        return [*checks, failure("ranks", detail, remedy)]
    return [*checks, ok("ranks", f"{size} on {len(hosts)} host(s): {_some(hosts)}")]


def versions(reports: dict[int, Report]) -> list[Check]:
    """What must be the same on all ranks; where one can't tell, another check says why."""
    checks, names = [], dict.fromkeys(name for report in reports.values() for name in report.versions)
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, report in sorted(reports.items()):
            if name in report.versions:
                ranks.setdefault(report.versions[name], []).append(rank)
        if len(ranks) > 1:
            (usual, many), *others = sorted(ranks.items(), key=lambda item: -len(item[1]))
            listed = "; ".join(f"{value} on {ranks_in_words(which)}" for value, which in others[:SHOWN])
            detail = f"{name} differs: {usual} on {ranks_in_words(many)}, {listed}"
            remedy = "Start all ranks in one environment: one PATH, one virtual environment, one file system."
            checks.append(replace(failure("versions", detail, remedy), rank=others[0][1][0]))
    return checks or [ok("versions", f"the same on all ranks: {', '.join(names)}")]


def clocks(gathering: Gathering) -> list[Check]:
    """How far each host's clock is from rank 0's."""
    gathering.ask_for_the_time(ASKED, PAUSE)
    checks, most = [], 0.0
    for host, ranks in gathering.hosts.items():
        both_ways, ahead = gathering.clocks.get(ranks[0], (0.0, 0.0))
        most = max(most, abs(ahead))
        if abs(ahead) < SLOW_CLOCK + both_ways:
            continue
        say = failure if abs(ahead) > WRONG_CLOCK + both_ways else warning
        detail = f"{host} is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} {gathering.peers[0].host}"
        remedy = (
            f"Set it (chronyc makestep on {host}). Until then a living run may be taken for a dead one by its lock, "
            "and logs of several hosts can't be put in order."
        )
        checks.append(replace(say("clocks", detail, remedy), rank=ranks[0]))
    return checks or [ok("clocks", f"{len(gathering.hosts)} hosts agree to {most * 1000:.1f} ms")]


def common_files(gathering: Gathering, patient: Patient, answers: Answers) -> list[Check]:
    """Does every host see a file that rank 0 writes where runs go?"""
    others = [ranks[0] for ranks in gathering.hosts.values() if ranks[0] != 0]
    path = nearest(patient.run_dir) / f".doctor-{secrets.token_hex(8)}"
    try:
        path.touch(exist_ok=False)
    except OSError:
        return []  # the check of the run directory says it
    try:
        seen = gathering.ask("look", str(path), others, answers, SEEN + patient.seconds)
    finally:
        with suppress(OSError):
            path.unlink()
    blind = [gathering.peers[rank].host for rank in others if not seen.get(rank)]
    if blind:
        detail = f"what rank 0 writes into {path.parent} is not seen on {_some(blind)}"
        remedy = "Choose a --run-dir, or a working directory, on a file system that all ranks see."
        return [failure("common files", detail, remedy)]
    return [ok("common files", f"{path.parent} is the same on {len(others) + 1} hosts")]


def look(path: str) -> bool:
    """Whether this file comes in sight."""
    deadline = time.monotonic() + SEEN
    while not os.path.exists(path) and time.monotonic() < deadline:
        with suppress(OSError):
            os.listdir(os.path.dirname(path))  # makes NFS look again instead of remembering that there was no file
        time.sleep(0.1)
    return os.path.exists(path)


def same_data(gathering: Gathering, patient: Patient, reports: dict[int, Report]) -> list[Check]:
    """Names and sizes of what the data directory holds."""
    found: dict[Any, list[str]] = {}
    for host, ranks in gathering.hosts.items():
        if ranks[0] in reports:
            found.setdefault(reports[ranks[0]].facts.get("data", "nothing"), []).append(host)
    if len(found) < 2:
        return []
    sides = " and ".join(_some(hosts) for hosts in found.values())
    remedy = "Give a --data-dir that every host sees, or the same copy on each."
    return [failure("data directory", f"{patient.data_dir} holds not the same on {sides}", remedy)]


def _some(hosts: list[str]) -> str:
    return ", ".join(hosts[:SHOWN]) + (f" and {len(hosts) - SHOWN} more" if len(hosts) > SHOWN else "")
