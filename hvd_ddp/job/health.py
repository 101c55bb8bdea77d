"""Who is alive: the job ends with the first failing rank's error and exit code, and only that one is printed.

Every rank beats over the line (job/line.py), rank 0 judges (job/judge.py). Who loses rank 0 judges it alike: no rank
waits for one that is dead, stopped, cut off or stuck, in a collective or elsewhere.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NoReturn

import psutil

from hvd_ddp.errors import FAILED
from hvd_ddp.job.failure import GONE, Record, check_verdict, interrupted, record, record_of, say, silent
from hvd_ddp.job.judge import GRACE, PARTING, Judge
from hvd_ddp.job.line import Line, told, told_number
from hvd_ddp.job.network import has_link
from hvd_ddp.job.pulse import Place
from hvd_ddp.job.rendezvous import Meeting
from hvd_ddp.job.stop import Agreement, Order

NO_ANSWER = 20.0  # seconds after which a failing rank that rank 0 does not answer speaks for itself
CLOCK_STEP = 5.0  # seconds by which a process's start may seem to move when the clock is set
WRITING = 3.0  # seconds that leaving may take for files: the file system may be what is broken


@contextlib.contextmanager
def ends_together(meeting: Meeting, *, timeout: float) -> Iterator[Line]:
    """Let a failure of any rank end all processes at once, hard: no clean-up may wait for ranks that are dead.

    Without one, all leave the context together. `timeout` is in seconds. Yields what the heartbeats go over.
    """
    health = _Health(meeting, timeout=timeout)
    try:
        yield health.line
        health.meet_at_the_end()
    except BaseException as error:
        health.fail(error)


def beat_interval(world_size: int, timeout: float) -> float:
    """Seconds from a rank's beat to its next.

    A rank that dies is named with the place of its last beat; but a beat is work beside the step, and ten a second took
    2 % of it. Rank 0 has at most 250 a second to read, and 820 in a job of 4,096 ranks.
    """
    return min(5.0, timeout / 10, max(1.0, world_size / 250))


class _Health:
    def __init__(self, meeting: Meeting, *, timeout: float) -> None:
        self.meeting, self.launch, self.timeout = meeting, meeting.launch, timeout
        self._beat = beat_interval(self.launch.world_size, timeout)
        self._ticked = time.monotonic()
        self._ended = threading.Event()
        self._verdict: Record | None = None
        self._rank_0 = Place()  # where it was when last heard of
        self.line = Line(self.launch.rank, meeting.connections)
        self.line.on |= {
            "beat": self._hear,
            "verdict": lambda _, verdict: self._end(verdict),
            "go": lambda *_: self._go(),
            "stop": lambda _, order: self.line.tell_main("aware", meeting.stop.ordered(told(Order, order))),
            "stop after": lambda _, step: meeting.stop.decided(told_number(step)),
        }
        self.line.on_beat, self.line.on_lost = self._tick, self._lost
        self.judge: Judge | None = None
        if self.launch.rank == 0:
            self.judge = Judge(
                self.launch,
                self.line,
                timeout=timeout,
                here=meeting.pulse.place,
                speak=self._speak,
                cut_off=self._cut_off,
            )
            Agreement(self.line, self.launch.world_size)
        meeting.stop.request = lambda order: self.line.tell_main("please stop", asdict(order))
        self.line.start(beat=self._beat)
        if meeting.stop.signals is not None:
            self.line.listen_to(meeting.stop.signals.descriptor, self._signalled)

    def meet_at_the_end(self) -> None:
        """Wait for every rank: one that leaves early would look dead, and mpirun kills the others after it."""
        self.meeting.pulse.at("meeting the others")
        self.line.tell_main("here")
        self._ended.wait()
        self.line.close()

    def fail(self, error: BaseException) -> NoReturn:
        """Tell rank 0, whose verdict ends this process; without one, speak for itself."""
        place, consequence = self.meeting.pulse.place(), self.meeting.lost_a_peer(error)
        known = record_of(self.launch, place, error, consequence=consequence)
        if self.launch.world_size > 1:
            self.line.tell_main("failure", known)
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait(NO_ANSWER)
        self.line.close()
        self._speak(known)
        self._say_farewell()
        os._exit(known["exit_code"])

    # From here on: on the line's thread.

    def _tick(self) -> None:
        now = time.monotonic()
        stood, self._ticked = now - self._ticked - self._beat, now
        if stood > self.timeout:  # this process was stopped; the others have named it and gone
            os._exit(FAILED)
        if stood > self._beat:  # what they said meanwhile is still to be read
            for rank in self.line.heard:
                self.line.heard[rank] += stood
        place = self.meeting.pulse.place()
        if self.judge is not None:
            self.line.tell_all("beat", asdict(place))
            self.judge.look(now)
        else:
            self.line.tell_main("beat", asdict(place))
            quiet = now - self.line.heard[0]
            if quiet > self.timeout + 2 * self._beat:  # if it lives, its own verdict comes first
                self._without_rank_0(silent(quiet))

    def _hear(self, rank: int, place: dict[str, Any]) -> None:
        if self.judge is not None:
            self.judge.hear(rank, told(Place, place))
        else:
            self._rank_0 = told(Place, place)

    def _lost(self, rank: int) -> None:
        if self.judge is not None:
            self.judge.lost(rank)
        elif not self._ended.is_set():
            self._without_rank_0(GONE)

    def _signalled(self) -> None:
        stop = self.meeting.stop
        for number in stop.signals.read() if stop.signals is not None else []:
            meaning = stop.signalled(number)
            if meaning == "leave":
                self.line.tell_main("failure", interrupted(self.launch, self.meeting.pulse.place()))
            elif meaning is not None:
                by = f" on rank {self.launch.rank}" if self.launch.world_size > 1 else ""
                stop.request(Order(meaning.why + by, meaning.exit_code))

    def _without_rank_0(self, words: str) -> None:
        """Rank 0 is lost. Nobody is left to choose who says so: the first to leave a record does."""
        if self._verdict is not None:
            os._exit(self._verdict["exit_code"])
        self._verdict = self._cut_off(0) or record(self.launch, 0, self._rank_0, words, seen="last seen in")
        if not self._speak(self._verdict):
            time.sleep(GRACE)  # a launcher may kill the one that speaks once another has left
        self._kill(0)
        self._say_farewell()
        os._exit(FAILED)

    def _cut_off(self, rank: int) -> Record | None:
        """Who has lost that rank because its own host has no link is the one that the others have lost."""
        hosts, interface = self.launch.hosts or (), self.meeting.interface
        if hosts[rank] == hosts[self.launch.rank] or has_link(interface):
            return None
        words = f"its host is cut off: {interface} is down"
        return record(self.launch, self.launch.rank, self.meeting.pulse.place(), words)

    def _end(self, verdict: Record) -> None:
        """The job ends here: leave when all know, for mpirun kills the others 0.5 s after the first has left."""
        self._verdict = verdict = check_verdict(verdict, self.launch.world_size)
        if verdict["still"]:
            _within(WRITING, lambda: self.meeting.write_stacks(faulthandler.dump_traceback))
        if verdict["kill"]:
            self._kill(verdict["rank"])
        self._say_farewell()
        self.line.tell_main("here")
        self.line.call_later(PARTING + 1, lambda: os._exit(verdict["exit_code"]))

    def _go(self) -> None:
        if self._verdict is None:
            self._ended.set()
        else:
            os._exit(self._verdict["exit_code"])

    def _speak(self, known: Record) -> bool:
        """Write the record and print it, unless another rank has; whether it was this one."""
        several, answers = self.launch.world_size > 1, list[bool]()
        if self.judge is not None:  # nobody else speaks, and the next moment may be too late
            say(known, several=several)
        _within(WRITING, lambda: answers.append(self.meeting.write_record(known)))
        first = answers != [False]
        if self.judge is None and first:
            say(known, several=several)
        return first

    def _kill(self, rank: int) -> None:
        """Of a silent rank on this host: it may be stopped, and launchers wait long for those."""
        hosts = self.launch.hosts or ()
        if rank == self.launch.rank or hosts[rank] != hosts[self.launch.rank]:
            return
        number, created = self.meeting.processes[rank]
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(number)
            if abs(process.create_time() - created) < CLOCK_STEP:  # else another has its number, or /proc is another
                process.kill()

    def _say_farewell(self) -> None:
        for farewell in self.meeting.farewells:
            _within(WRITING, farewell)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()


def _within(seconds: float, work: Callable[[], object]) -> None:
    """Do it, but do not wait longer; the first failure counts, so that one of this is dropped."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)
