"""A host of the cluster: its daemons, its processes, its cable."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from . import settings
from .namespaces import Process, Space
from .programs import Program

DAEMONS = {"munged", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd", "sshd"}
INTERFACE = "eth0"


def wait_until(condition: Callable[[], object], what: str, timeout: float = 10) -> None:
    """Look every 50 ms; AssertionError after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"after {timeout} s still not: {what}"
        time.sleep(0.05)


def call(command: list[str], timeout: float = 30) -> str:
    """What a small command writes; AssertionError when it fails."""
    with Program(command) as program:
        result = program.wait(timeout)
    assert result.code == 0, f"{command}: {result.text}"
    return result.out


class Host:
    """A machine with its own name, address, /tmp, /dev/shm, /run and processes."""

    def __init__(self, name: str, address: str, space: Space, switch: Space, directory: Path) -> None:
        self.name = name
        self.address = address
        self.space = space
        self.interface = INTERFACE
        self._port = f"{name}-10"  # the other end of the cable, at the switch
        self._switch = switch
        self._cluster = directory
        self._own = directory / name

    def call(self, *program: str, timeout: float = 30) -> str:
        """What a small command on this host writes; AssertionError when it fails."""
        return call(self.space.command(list(program), "/"), timeout)

    # Daemons

    def start(self, *program: str) -> None:
        """Start a daemon that stays in the foreground; its output goes to NAME.log."""
        log = self._own / f"{Path(program[0]).name}.log"
        # As a child of nsenter it would hold the room open: nsenter stops when its child does, and nobody continues it.
        detach = 'exec setsid --fork env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@" >>"$0" 2>&1'
        self.call("sh", "-c", detach, str(log), *program)

    def boot(self) -> None:
        """The daemons of a node; also after `crash`."""
        self.mend()
        self.start("/usr/sbin/sshd", "-D", "-e", "-f", f"{self._cluster}/ssh/sshd")
        self.start_slurmd()

    def start_slurmd(self) -> None:
        self.start("/usr/sbin/slurmd", "-D")

    def kill_slurmd(self) -> None:
        """As if the daemon had crashed: jobs go on."""
        self.signal(signal.SIGKILL, [process for process in self.space.processes() if process.name == "slurmd"])

    # Processes

    def processes(self) -> list[Process]:
        """Those of jobs and of whoever logged in, without daemons and without zombies."""
        return [process for process in self.space.processes() if process.name not in DAEMONS]

    def pids(self) -> list[int]:
        """Of `processes`, as this program sees them."""
        return [process.pid for process in self.processes()]

    def signal(self, number: int, processes: list[Process] | None = None) -> None:
        """Send a signal to these processes, by default to those of jobs."""
        for process in self.processes() if processes is None else processes:
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                parent = psutil.Process(process.pid).parent()
                os.kill(process.pid, number)
                if number == signal.SIGCONT and parent and parent.name() == "nsenter":
                    parent.resume()  # it stopped when its child did

    def stop(self) -> None:
        """SIGSTOP to the processes of jobs; `resume` undoes it."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to the processes of jobs."""
        self.signal(signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP to everything, daemons too: a machine that hangs. `thaw` undoes it."""
        self.signal(signal.SIGSTOP, self.space.processes())

    def thaw(self) -> None:
        self.signal(signal.SIGCONT, self.space.processes())

    def crash(self) -> None:
        """Pull the cable and kill everything: a machine that lost its power. `boot` starts it again."""
        self.cut()
        self.signal(signal.SIGKILL, self.space.processes())

    # Network

    def plug(self) -> None:
        """Lay the cable to the switch."""
        self._cable(INTERFACE, 10, f"{self.address}/24")
        self._at_switch(f"ip link set {self._port} master switch")
        self.call("sh", "-ec", f"ip link set lo up; ip route add default via {settings.GATEWAY}")

    def cut(self) -> None:
        """Pull the cable: no carrier, packets are lost both ways."""
        self._at_switch(f"ip link set {self._port} down")

    def mend(self) -> None:
        self._at_switch(f"ip link set {self._port} up")

    def slow(self, mbit: float) -> None:
        """Limit the cable to so many megabits a second each way; `unslow` undoes it."""
        limit = f"root tbf rate {mbit}mbit burst 32kb latency 100ms"
        self._at_switch(f"tc qdisc replace dev {self._port} {limit}")
        self.call("tc", *f"qdisc replace dev {self.interface} {limit}".split())

    def unslow(self) -> None:
        self._at_switch(f"tc qdisc delete dev {self._port} root")
        self.call("tc", "qdisc", "delete", "dev", self.interface, "root")

    def rename_interface(self, name: str) -> None:
        """Call the interface `name` instead of eth0, as on a node with other hardware."""
        old, self.interface = self.interface, name
        self.call("sh", "-ec", f"ip link set {old} down; ip link set {old} name {name}; ip link set {name} up")
        self.call("ip", "route", "replace", "default", "via", settings.GATEWAY)

    def add_interface(self, name: str, address: str, *, first: bool = True) -> None:
        """One more interface, up and with a carrier, from which nobody can be reached; listed before the real one.

        `address` with its prefix length: 192.168.44.1/24.
        """
        taken = len(self.call("ip", "-o", "link").splitlines())
        self._cable(name, taken if first else 10 + taken, address)

    def write_hosts(self, text: str) -> None:
        """Replace this host's /etc/hosts."""
        (self._own / "hosts").write_text(text)

    def _cable(self, interface: str, index: int, address: str) -> None:
        """From `interface` here to a port at the switch; interfaces are listed by their index."""
        port = f"{self.name}-{index}"
        peer = f"peer name {port} netns {self._switch.pid}"
        _call_in(self.space, f"ip link add {interface} index {index} type veth {peer}")
        self._at_switch(f"ip link set {port} up")
        self.call("sh", "-ec", f"ip address add {address} dev {interface}; ip link set {interface} up")

    def _at_switch(self, words: str) -> str:
        return _call_in(self._switch, words)


def _call_in(space: Space, words: str) -> str:
    """In the network of that space, but with the process numbers that this program sees."""
    return call(["nsenter", f"--net=/proc/{space.pid}/ns/net", *words.split()])
