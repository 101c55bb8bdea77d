"""A program that runs beside the test, with limits; its output goes to files, which no left-over child can hold up."""

import os
import signal
import subprocess
import tempfile
from contextlib import suppress

import psutil
from launchers import Result, environment


class Program:
    """A command line that enters a host; the end of `with` kills it."""

    def __init__(self, command: list[str], **env: str) -> None:
        self._out = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        self._err = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        self.command = command
        self._entry = subprocess.Popen(
            command,
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    @property
    def result(self) -> Result:
        """What there is so far; code -1 while it runs."""
        code = self._entry.poll()
        # pread leaves alone the position at which the program writes.
        out, err = (os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in (self._out, self._err))
        return Result(-1 if code is None else code, out.decode(errors="replace"), err.decode(errors="replace"))

    @property
    def pid(self) -> int:
        """The program's own number, as seen here."""
        (inner,) = psutil.Process(self._entry.pid).children()
        return inner.pid

    def wait(self, timeout: float) -> Result:
        """AssertionError, and its process group killed, if it takes longer than so many seconds."""
        try:
            self._entry.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"still running after {timeout} s: {self.command}\n{self.result.text[-8000:]}"
            ) from None
        return self.result

    def kill(self) -> None:
        """SIGKILL to its process group, if it still runs. What left the group ends with the cluster.

        nsenter goes last: a child that survives it would go to this machine's first process, which may bury it late or
        never, and a host is not gone before all its dead are buried.
        """
        while self._entry.poll() is None:
            group = [pid for pid in psutil.pids() if pid != self._entry.pid and _group(pid) == self._entry.pid]
            for pid in group or [self._entry.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._entry.send_signal(signal.SIGCONT)  # it stops when its child does
            with suppress(subprocess.TimeoutExpired):
                self._entry.wait(0.1)

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._out.close()
        self._err.close()


def _group(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None
