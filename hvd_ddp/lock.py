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

BEAT = 5.0  # seconds between two signs of life
CLOCK_STEP = 5.0  # seconds; no process number comes round in that time


class Lock:
    """A file that names the holder, touched while it lives.

    A holder is dead when its process on this host is gone, when it is an earlier start of this very scheduler job, or
    when the file stood still for `timeout` seconds.
    """

    def __init__(self, directory: Path, launch: Launch, *, timeout: float) -> None:
        self._path = directory / "lock.json"
        self._timeout, self._launch = timeout, launch
        self._mine = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "created": psutil.Process().create_time(),
            "job": launch.scheduler_job,
            "restart": launch.scheduler_restart,
        }
        self._stop = threading.Event()

    def refuse_if_held(self) -> None:
        """Raise HvdDDPError that names the holder, if another job is alive in the directory."""
        holder = read_json(self._path)
        if holder and holder != self._mine and self._alive(holder):
            job = f", job {holder['job']}" if holder.get("job") else ""
            raise HvdDDPError(
                f"`{self._path.parent}` is in use by process {holder.get('pid')} on {holder.get('host')}{job}. "
                "Wait for it or stop it, or choose another --run-dir."
            )

    def _alive(self, holder: dict[str, Any]) -> bool:
        if holder.get("host") == self._mine["host"]:
            try:
                # The kernel counts from boot, and the time of boot moves when the clock is set.
                created: float = psutil.Process(int(holder["pid"])).create_time()
                return abs(created - float(holder["created"])) < CLOCK_STEP
            except (psutil.Error, KeyError, TypeError, ValueError):
                return False
        same_job = self._mine["job"] is not None and holder.get("job") == self._mine["job"]
        if same_job and int(holder.get("restart", 0)) < self._launch.scheduler_restart:
            return False
        try:
            return time.time() - self._path.stat().st_mtime < max(self._timeout, 3 * BEAT)
        except OSError:
            return False

    def acquire(self) -> None:
        """Take the directory. Raises HvdDDPError if another job is alive in it."""
        with _one_at_a_time(self._path.parent):
            self.refuse_if_held()
            mine = self._path.with_name(f"lock.{secrets.token_hex(8)}.tmp")
            try:
                mine.write_text(json.dumps(self._mine))
                self._path.unlink(missing_ok=True)  # of a dead one
                os.link(mine, self._path)  # there with its content, or not at all; also on NFS
            except FileExistsError:
                self.refuse_if_held()
                raise HvdDDPError(f"`{self._path.parent}` was taken by another job just now. Start again.") from None
            finally:
                mine.unlink(missing_ok=True)
        threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def release(self) -> None:
        """Give the directory back."""
        self._stop.set()
        with contextlib.suppress(OSError):
            self._path.unlink()


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
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
