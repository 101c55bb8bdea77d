"""Rank 0 judges: it hears where every rank is, finds the one at fault, and speaks for all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hvd_ddp.job.failure import GONE, Record, check_report, names, record, silent
from hvd_ddp.job.launch import Launch
from hvd_ddp.job.line import Line
from hvd_ddp.job.pulse import Place

GRACE = 1.0  # seconds after an error that a dead peer may have caused, in which that peer's end shows
MOST_PLACES = 4  # that a message tells
PARTING = 5.0  # seconds that ranks wait for each other to learn of the first failure


class Judge:
    """Lives on the line's thread of rank 0.

    A rank is at fault when it says so, when its process is gone (its connection closed), when it is silent for
    `timeout` seconds (stopped, or cut off), or when it lives but stands still that long. The first one is.
    """

    def __init__(
        self,
        launch: Launch,
        line: Line,
        *,
        timeout: float,
        here: Callable[[], Place],
        speak: Callable[[Record], object],
        cut_off: Callable[[int], Record | None] = lambda rank: None,
    ) -> None:
        """`here`: rank 0's own place. `cut_off`: why not the rank that is lost but this one is at fault, if so."""
        self._launch, self._line, self._timeout = launch, line, timeout
        self._own_place, self._speak, self._cut_off = here, speak, cut_off
        self._places = {rank: Place() for rank in range(launch.world_size)}
        self._moved = dict.fromkeys(self._places, time.monotonic())
        self._reports: list[Record] = []
        self._here: set[int] = set()  # at the end, or knows of the verdict
        self._gone: set[int] = set()
        self._judged = False
        line.on |= {"failure": lambda rank, report: self._report(check_report(report, rank)), "here": self._arrive}

    def hear(self, rank: int, place: Place) -> None:
        """A rank's heartbeat."""
        if place.moves != self._places[rank].moves:
            self._moved[rank] = time.monotonic()
        self._places[rank] = place

    def lost(self, rank: int) -> None:
        """The connection to a rank is closed."""
        self._gone.add(rank)
        if rank not in self._here:
            self._report(self._lost(rank, GONE, gone=[rank]))
        self._release()

    def look(self, now: float) -> None:
        """Look for ranks that are silent or stand still; `now` is of time.monotonic."""
        quiet = [rank for rank, heard in self._line.heard.items() if now - heard > self._timeout]
        if quiet:
            rank = quiet[0]
            words = silent(now - self._line.heard[rank]) + _with(quiet[1:])
            self._report(self._lost(rank, words, gone=quiet, kill=True))
            return
        if any(place.long for place in self._places.values()):  # the others may be waiting for that one
            self._moved = dict.fromkeys(self._moved, now)
        late = [rank for rank, moved in self._moved.items() if now - moved > self._timeout]
        if any(now - self._line.heard.get(rank, now) > self._timeout / 2 for rank in late):
            return  # silent soon, rather than still
        if len(late) == len(self._places) or any(not self._places[rank].waiting for rank in late):
            self._blame([rank for rank, moved in self._moved.items() if now - moved > self._timeout / 2], now)

    def _blame(self, still: list[int], now: float) -> None:
        """Of those that stand still, the few stand where the many do not; if as many, those that are behind."""
        first, *others = sorted(self._groups(still), key=lambda ranks: (len(ranks), self._places[ranks[0]].moves))
        rank = first[0]
        words = f"it has stood still for {now - self._moved[rank]:.0f} s{_with(first[1:])}{self._meanwhile(others)}"
        self._report(record(self._launch, rank, self._places[rank], words, still=True))

    def _lost(self, rank: int, words: str, *, gone: list[int], **more: Any) -> Record:
        if instead := self._cut_off(rank):
            return instead
        self._places[0] = self._own_place()
        words += self._meanwhile(self._groups([other for other in self._places if other not in self._gone | {*gone}]))
        return record(self._launch, rank, self._places[rank], words, seen="last seen in", **more)

    def _groups(self, ranks: list[int]) -> list[list[int]]:
        """Those in the same place together."""
        groups: dict[tuple[int, str], list[int]] = {}
        for rank in ranks:
            groups.setdefault((self._places[rank].step, self._places[rank].phase), []).append(rank)
        return list(groups.values())

    def _meanwhile(self, groups: list[list[int]]) -> str:
        words = []
        for group in groups[:MOST_PLACES]:
            host = (self._launch.hosts or ())[group[0]]
            who = f"rank {group[0]} on {host}" if len(group) == 1 else f"{len(group)} ranks ({names(group)})"
            words.append(f"{who} in {self._places[group[0]]}")
        return f". Meanwhile {', '.join(words)}" if words else ""

    def _report(self, report: Record) -> None:
        """One rank is at fault; or it suffers from another's end, and that one shows within GRACE."""
        self._reports.append(report)
        if report.get("consequence") and len(self._reports) < self._launch.world_size:
            self._line.call_later(GRACE, self._decide)
        else:
            self._decide()

    def _decide(self) -> None:
        if self._judged:
            return
        self._judged = True
        verdict = min(self._reports, key=lambda report: bool(report.get("consequence")))
        self._speak(verdict)
        self._here.clear()
        self._line.tell_all("verdict", {name: verdict.get(name) for name in ("rank", "exit_code", "still", "kill")})
        self._line.call_later(PARTING, lambda: self._line.tell_all("go"))

    def _arrive(self, rank: int, _: Any) -> None:
        self._here.add(rank)
        self._release()

    def _release(self) -> None:
        if self._here and len(self._here | self._gone) == len(self._places):
            self._line.tell_all("go")


def _with(ranks: list[int]) -> str:
    return f" (with {len(ranks)} more: {names(ranks)})" if ranks else ""
