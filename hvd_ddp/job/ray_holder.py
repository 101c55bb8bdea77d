"""What runs in a Ray worker: it holds the process of one rank, hands on what that says, and takes it along at its end.

Training owns the main thread, the signals and the exit code of its process, as a Ray worker does of its own: so a rank
is a child of the actor. This file travels to the worker by value, which need not find hvd_ddp before the rank is in its
folder: nothing but the standard library in here.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CARD = ".rendezvous-card"  # the name under which a rank leaves and looks for rank 0's card, in a folder of its own
LOOK_AGAIN = 0.05  # seconds
# PR_SET_PDEATHSIG, SIGKILL: however the actor ends, its rank does. It outlives the exec.
TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp('env', ['env', *sys.argv[1:]])"


class Holder:
    """An actor. `start` comes first; the other methods may be called at the same time."""

    def node(self) -> tuple[str, str]:
        """Ray's name for this node, and its host name."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.uname().nodename

    def start(self, arguments: list[str], facts: dict[str, str], folder: str) -> str | None:
        """Start `python <arguments>` in this folder with these variables; why that can't be, where it can't."""
        if not os.path.isdir(folder):
            return f"there is no `{folder}`, in which launch was started"
        self._own = Path(tempfile.mkdtemp(prefix="hvd_ddp-"))
        variables = [f"{name}={value}" for name, value in {**facts, "HVD_DDP_RAY_FOLDER": str(self._own)}.items()]
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # of this thread: Ray blocks SIGINT, and the rank inherits it
        self._rank = subprocess.Popen(
            [sys.executable, "-c", TIED, *variables, sys.executable, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._pipes = selectors.DefaultSelector()
        for number, pipe in enumerate((self._rank.stdout, self._rank.stderr)):
            assert pipe is not None
            self._pipes.register(pipe, selectors.EVENT_READ, number)
        return None

    def listen(self) -> tuple[bytes, bytes, int | None]:
        """What the rank writes next to stdout and to stderr; with its last words its exit code, as Popen has it."""
        said = [b"", b""]
        for key, _ in self._pipes.select():
            said[key.data] = os.read(key.fd, 1 << 16)
            if not said[key.data]:
                self._pipes.unregister(key.fileobj)
        if self._pipes.get_map():
            return said[0], said[1], None
        code = self._rank.wait()
        shutil.rmtree(self._own, ignore_errors=True)
        return said[0], said[1], code

    def signal(self, number: int) -> None:
        """Send the rank a signal; nothing where it has ended."""
        self._rank.send_signal(number)

    def take_card(self) -> bytes:
        """Rank 0's card, when it is there; nothing if the rank ends before."""
        while not (self._own / CARD).exists():
            if self._rank.poll() is not None:
                return b""
            time.sleep(LOOK_AGAIN)
        return (self._own / CARD).read_bytes()

    def put_card(self, card: bytes) -> None:
        """Lay rank 0's card where this rank looks for it."""
        temporary = self._own / "card"
        temporary.write_bytes(card)
        temporary.replace(self._own / CARD)
