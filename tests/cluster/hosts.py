"""A host of the cluster: its daemons, its cable, its processes."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from launchers import environment

from .namespaces import Process, Space

DAEMONS = {"munged", "slurmctld", "slurmd", "slurmstepd", "sshd", "sshd-session"}


def wait_until(condition, what: str, timeout: float = 10) -> None:
    """Look every 50 ms; AssertionError after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"after {timeout} s still not: {what}"
        time.sleep(0.05)


class Host:
    """A machine with its own name, address, /tmp, /dev/shm, /run and processes; `port` is its end at the switch."""

    def __init__(self, name: str, address: str, space: Space, switch: Space, directory: Path) -> None:
        self.name = name
        self.address = address
        self.space = space
        self.port = f"port-{name}"
        self._switch = switch
        self._cluster = directory
        self._own = directory / name

    def command(self, program: list[str], cwd: Path | str | None = None) -> list[str]:
        """The command line that runs `program` on this host, for launchers.run and the like."""
        return self.space.command(program, cwd)

    def call(self, *program: str, timeout: float = 30) -> str:
        """What a small command on this host says; CalledProcessError when it fails."""
        command = self.command(list(program), "/")
        return subprocess.run(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=True,
        ).stdout

    # Daemons

    def start(self, *program: str) -> None:
        """Start a daemon that stays in the foreground; its output goes to NAME.log."""
        with (self._own / f"{Path(program[0]).name}.log").open("ab") as log:
            subprocess.Popen(
                self.command(list(program), "/"),
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_sshd(self) -> None:
        self.start("/usr/sbin/sshd", "-D", "-e", "-f", f"{self._cluster}/ssh/sshd")

    def start_slurmd(self) -> None:
        self.start("/usr/sbin/slurmd", "-D")

    def kill_slurmd(self) -> None:
        """As if the daemon had crashed; jobs go on."""
        self.signal(signal.SIGKILL, [process for process in self.space.processes() if process.name == "slurmd"])

    # Processes

    def processes(self) -> list[Process]:
        """Those of jobs and of whoever logged in, without daemons."""
        return [process for process in self.space.processes() if process.name not in DAEMONS]

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes()]

    def signal(self, number: int, processes: list[Process] | None = None) -> None:
        """Send a signal to these processes, by default to those of jobs."""
        for process in self.processes() if processes is None else processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def stop(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    # Network

    def plug(self, interface: str, index: int) -> None:
        """Lay the cable from `interface` of this host to the switch."""
        netns = str(self.space.pid)
        self._link("add", self.port, "type", "veth", "peer", "name", interface, "index", str(index), "netns", netns)
        self._link("set", self.port, "master", "switch", "up")
        self.call("ip", "address", "add", f"{self.address}/24", "dev", interface)
        self.call("ip", "link", "set", interface, "up")
        self.call("ip", "link", "set", "lo", "up")

    def cut(self) -> None:
        """Pull the cable: no carrier, packets are lost both ways."""
        self._link("set", self.port, "down")

    def mend(self) -> None:
        self._link("set", self.port, "up")

    def _link(self, *words: str) -> None:
        command = ["nsenter", f"--net=/proc/{self._switch.pid}/ns/net", "ip", "link", *words]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
