"""A batch job, as `scontrol show job` tells of it; there is no accounting database."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .slurm import Cluster

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}


class Job:
    """Everything but `id` is asked anew each time, which takes 20 ms."""

    def __init__(self, cluster: "Cluster", number: str) -> None:
        self.id = number
        self._cluster = cluster

    def info(self) -> dict[str, str]:
        """All fields of `scontrol show job`."""
        return dict(re.findall(r"(\S+?)=(\S*)", self._cluster.scontrol("show", "job", self.id)))

    @property
    def state(self) -> str:
        """PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, ..."""
        return self.info()["JobState"]

    @property
    def exit_code(self) -> int:
        """What the batch script ended with; 128 + N when signal N ended it."""
        code, number = map(int, self.info()["ExitCode"].split(":"))
        return 128 + number if number else code

    @property
    def requeues(self) -> int:
        """How often it was put back into the queue."""
        return int(self.info()["Restarts"])

    @property
    def log(self) -> str:
        """Its standard output so far, empty before it has any."""
        path = Path(self.info()["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, timeout: float) -> str:
        """The state that it ends in; AssertionError if it has none after `timeout` seconds."""
        self.until(lambda: self.state in ENDED, "end", timeout)
        return self.state

    def wait_state(self, state: str, timeout: float) -> None:
        self.until(lambda: self.state == state, f"become {state}", timeout)

    def wait_log(self, text: str, timeout: float) -> None:
        self.until(lambda: text in self.log, f"write {text!r}", timeout)

    def until(self, condition: Callable[[], object], what: str, timeout: float) -> None:
        """Look five times a second."""
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                story = f"{self.info()}\n{self.log[-6000:]}\n{self._cluster.controller_log()[-3000:]}"
                raise AssertionError(f"job {self.id} did not {what} in {timeout} s: {story}")
            time.sleep(0.2)

    def cancel(self, *options: str) -> None:
        """`scancel`, with options such as `--signal=USR1`, `--batch`, `--full`."""
        self._cluster.scancel(*options, self.id)

    def requeue(self) -> None:
        self._cluster.scontrol("requeue", self.id)
