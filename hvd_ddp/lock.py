"""One job at a time in a run directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch
from hvd_ddp.outside import from_json, read

BEAT = 5.0  # seconds between two signs of life
FRESH = 1.0  # seconds for which one look at the lock is enough, for small writes
LONGEST = 100  # characters that an error quotes of each fact in the file
CLOCK_STEP = 5.0  # seconds; no process number comes round in that time


class Lock:
    """A file that names the holder, touched while it lives.

    A holder is dead when its process on this host is gone, when it is an earlier start of this very scheduler job, or
    when the file stood still for `timeout` seconds. Who was taken for dead and lives learns it from `check`.
    """

    def __init__(self, directory: Path, launch: Launch, *, timeout: float) -> None:
        self._path = directory / "lock.json"
        self._timeout, self._launch = timeout, launch
        self.holder: dict[str, Any] = {
            "host": socket.gethostname(),
            "processes": _process_numbers(),
            "pid": os.getpid(),
            "created": psutil.Process().create_time(),
            "job": launch.scheduler_job,
            "restart": launch.scheduler_restart,
        }
        self._file = -1
        self._looked = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)

    def refuse_if_held(self, now: float | None = None) -> None:
        """Raise HvdDDPError that names the holder, if another job is alive in the directory.

        `now`: by the clock of the file system, which may not be this host's.
        """
        holder = read_json(self._path)
        if holder and holder != self.holder and self._alive(holder, time.time() if now is None else now):
            folder = self._path.parent
            raise HvdDDPError(
                f"`{folder}` is in use by {_name(holder)}. Wait for it or stop it, or choose another --run-dir."
            )

    def _alive(self, holder: dict[str, Any], now: float) -> bool:
        if all(holder.get(name) == self.holder[name] for name in ("host", "processes")):
            try:
                # The kernel counts from boot, and the time of boot moves when the clock is set.
                created: float = psutil.Process(int(holder["pid"])).create_time()
                return abs(created - float(holder["created"])) < CLOCK_STEP
            except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
                return False
        same_job = self.holder["job"] is not None and holder.get("job") == self.holder["job"]
        restart = holder.get("restart", 0)
        if same_job and (not isinstance(restart, int) or restart < self._launch.scheduler_restart):
            return False
        try:
            return now - self._path.stat().st_mtime < max(self._timeout, 3 * BEAT)
        except OSError:
            return False

    def acquire(self) -> dict[str, Any]:
        """Take the directory; what `holder` is from now on. Raises HvdDDPError if another job is alive in it."""
        with _one_at_a_time(self._path.parent):
            self._clean()
            mine = self._path.with_name(f"lock.{secrets.token_hex(8)}.tmp")
            try:
                mine.write_text(json.dumps(self.holder))
                self.refuse_if_held(mine.stat().st_mtime)
                self._path.unlink(missing_ok=True)  # of a dead one
                os.link(mine, self._path)  # there with its content, or not at all; also on NFS
                self._file = os.open(mine, os.O_RDONLY)
            except FileExistsError:
                self.refuse_if_held()
                raise HvdDDPError(f"`{self._path.parent}` was taken by another job just now. Start again.") from None
            finally:
                mine.unlink(missing_ok=True)
        self._thread.start()
        return self.holder

    def _clean(self) -> None:
        """Delete what was left by one that was killed in `acquire`, where another may still be in it."""
        for stale in self._path.parent.glob("lock.*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - stale.stat().st_mtime > 60:
                    stale.unlink()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self._file)  # not the path: it may be a successor's by now

    def check(self, *, now: bool = True) -> None:
        """Raise HvdDDPError if the directory is not `holder`'s any more; OSError where that can't be seen.

        Without `now` it is enough to have looked within the last second.
        """
        if not now and abs(time.time() - self._looked) < FRESH:
            return
        try:
            found = from_json(read(self._path))
        except ValueError:
            found = {}
        except FileNotFoundError:
            if not any(self._path.parent.iterdir()):
                raise  # the whole directory is gone: perhaps its disk comes back
            found = {}
        if found != self.holder:
            taken = isinstance(found, dict) and found
            who = f"has been taken over by {_name(found)}" if taken else f"has lost its `{self._path.name}`"
            raise HvdDDPError(
                f"`{self._path.parent}` {who}: this start does not hold it any more, ends here and writes nothing. "
                "If no other job goes on there, give the same command again."
            )
        self._looked = time.time()

    def release(self) -> None:
        """Give the directory back, if it still is `holder`'s."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(BEAT)
            os.close(self._file)
        with contextlib.suppress(OSError, HvdDDPError), _one_at_a_time(self._path.parent):
            self.check()
            self._path.unlink()


def _name(holder: dict[str, Any]) -> str:
    pid, host, job = (str(holder.get(name) or "")[:LONGEST] for name in ("pid", "host", "job"))
    return f"process {pid} on {host}" + (f", job {job}" if job else "")


def _process_numbers() -> int:
    """Which processes the numbers of this one's /proc mean: a container on the same host may have its own."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let nobody else judge and replace the lock meanwhile, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file, or an empty one where there is none."""
    try:
        value = from_json(read(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
