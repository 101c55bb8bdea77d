"""One job at a time in a run directory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch

BEAT = 5.0  # seconds between two signs of life


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
                return bool(psutil.Process(int(holder["pid"])).create_time() == holder["created"])
            except (psutil.Error, KeyError, ValueError):
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
        text = json.dumps(self._mine)
        for _ in range(10):
            self.refuse_if_held()
            with contextlib.suppress(FileNotFoundError):
                if read_json(self._path):  # of a dead one: whoever moves it away may try to make the new one
                    os.rename(self._path, self._path.with_name(f"lock.{os.getpid()}.tmp"))
            with contextlib.suppress(FileExistsError):
                with open(self._path, "x") as file:
                    file.write(text)
                break
        self.refuse_if_held()
        with contextlib.suppress(OSError):
            self._path.with_name(f"lock.{os.getpid()}.tmp").unlink()
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


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file, or an empty one where there is none."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
