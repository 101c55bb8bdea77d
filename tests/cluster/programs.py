"""A program that runs beside the test, with limits; its output goes to files, which no left-over child can hold up."""

import os
import signal
import subprocess
import tempfile

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
        """SIGKILL to its process group, if it still runs. What left the group ends with the cluster."""
        if self._entry.poll() is None:
            os.killpg(self._entry.pid, signal.SIGKILL)
            self._entry.wait()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._out.close()
        self._err.close()
