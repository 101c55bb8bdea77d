"""Namespaces of the kernel, held open by a first process; whatever runs in them ends with it.

A room holds a whole cluster: its process namespace contains those of the hosts, and its network namespace the switch.
So one kill, or the end of the program that opened it, leaves no process, interface, mount or address behind.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

import psutil

ROOM = ["--net", "--pid", "--fork", "--kill-child"]
HOST = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
# Orphans go to the first process; the kernel buries them at once for one that ignores SIGCHLD.
HOLD = "exec env --ignore-signal=CHLD"


@dataclass(frozen=True)
class Process:
    """A process of a host: `pid` as seen here, `inside` as its host sees it."""

    pid: int
    inside: int
    name: str
    command: str
    state: str


@dataclass(frozen=True)
class Space:
    """Namespaces whose first process is `pid`."""

    pid: int
    kinds: tuple[str, ...] = ("mount", "net", "uts", "ipc", "pid")

    def command(self, program: list[str], cwd: Path | str | None = None) -> list[str]:
        """The command line that runs `program` in here."""
        enter = ["nsenter", "--target", str(self.pid), *(f"--{kind}" for kind in self.kinds)]
        return [*enter, *([f"--wdns={cwd}"] if cwd else []), "--", *program]

    def alive(self) -> bool:
        return psutil.pid_exists(self.pid)

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
            state = status["State"][0]
            if state not in "ZX":
                inside = int(status["NSpid"].split()[-1])
                found.append(Process(pid, inside, status["Name"], command.strip(), state))
        return found


def open_room(keep: bool, lock: int) -> Space:
    """A room that ends with this program, or one that stays (`keep`); it holds the lock file's descriptor."""
    hold = f"{HOLD} sleep infinity" if keep else f"{HOLD} cat >/dev/null"
    return _open(["unshare", *ROOM], hold, ("net", "pid"), stdin=subprocess.DEVNULL if keep else PIPE, lock=lock)


def open_host(room: Space, setup: str) -> Space:
    """A host in that room, whose first process begins with `setup` (shell)."""
    return _open(room.command(["unshare", *HOST]), f"{setup}\n{HOLD} sleep infinity", Space(0).kinds)


def _open(
    unshare: list[str], script: str, kinds: tuple[str, ...], *, stdin: int = subprocess.DEVNULL, lock: int | None = None
) -> Space:
    setup, _, hold = script.rpartition("\n")
    parent = subprocess.Popen(
        [*unshare, "sh", "-ec", f"{setup}\necho ready\n{hold}"],
        stdin=stdin,
        stdout=PIPE,
        start_new_session=True,
        pass_fds=() if lock is None else (lock,),
    )
    assert parent.stdout
    with parent.stdout:
        if parent.stdout.readline() != b"ready\n":
            raise RuntimeError(f"no namespaces: the first process ended with {parent.wait()}. Is this root?")
    first = psutil.Process(parent.pid)
    while children := first.children():
        (first,) = children
    return Space(first.pid, kinds)
