"""Namespaces of the kernel, held open by a first process; whatever runs in them ends with it.

A room holds a whole cluster: its process namespace contains those of the hosts, and its network namespace the switch.
So one kill, or the end of the program that opened it, leaves no process, interface, mount or address behind.
"""

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE

import psutil

ROOM = ["--net", "--pid", "--fork", "--kill-child"]
HOST = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
ALL = ("mount", "net", "uts", "ipc", "pid")
# A process without a parent goes to the first process; the kernel buries it at once if that one ignores SIGCHLD.
HOLD = "exec env --ignore-signal=CHLD"


@dataclass(frozen=True)
class Process:
    """A process of a host: `pid` as seen here, `inside` as its host sees it."""

    pid: int
    inside: int
    name: str
    command: str


@dataclass(frozen=True)
class Space:
    """Namespaces whose first process is `pid`."""

    pid: int
    kinds: tuple[str, ...] = ALL
    parent: "subprocess.Popen[bytes] | None" = field(default=None, compare=False, repr=False)

    def command(self, program: list[str], cwd: Path | str | None = None) -> list[str]:
        """The command line that runs `program` in here."""
        enter = ["nsenter", "--target", str(self.pid), *(f"--{kind}" for kind in self.kinds)]
        return [*enter, *([f"--wdns={cwd}"] if cwd else []), "--", *program]

    def processes(self) -> list[Process]:
        """What runs in here but for the first process, zombies left out."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for pid in psutil.pids():
            try:
                if pid == self.pid or os.readlink(f"/proc/{pid}/ns/pid") != own:
                    continue
                status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it ended meanwhile
            if status["State"][0] not in "ZX":
                found.append(Process(pid, int(status["NSpid"].split()[-1]), status["Name"], command.strip()))
        return found


def open_room(keep: bool, lock: int) -> Space:
    """A room that ends with this program, or one that stays (`keep`); it holds the lock file's descriptor."""
    hold = f"echo ready; {HOLD} {'sleep infinity' if keep else 'cat'}"
    return _open(["unshare", *ROOM, "sh", "-c", hold], ("net", "pid"), DEVNULL if keep else PIPE, (lock,))


def open_host(room: Space, setup: Path) -> Space:
    """A host in that room, whose first process begins with the shell script `setup`."""
    setup.write_text(f"set -e\n{setup.read_text()}\necho ready\n{HOLD} sleep infinity\n")
    return _open(room.command(["unshare", *HOST, "sh", str(setup)]), ALL, DEVNULL, ())


def _open(command: list[str], kinds: tuple[str, ...], stdin: int, descriptors: tuple[int, ...]) -> Space:
    # unshare grumbles on stderr when its child is killed.
    parent = subprocess.Popen(
        command, stdin=stdin, stdout=PIPE, stderr=DEVNULL, start_new_session=True, pass_fds=descriptors
    )
    assert parent.stdout
    with parent.stdout:
        if parent.stdout.readline() != b"ready\n":
            raise RuntimeError(
                f"{command} ended with {parent.wait()}. Without new namespaces there is no cluster. "
                "Be root, in a container that may mount."
            )
    first = psutil.Process(parent.pid)
    while children := first.children():
        (first,) = children
    return Space(first.pid, kinds, parent)
