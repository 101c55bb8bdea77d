"""Cluster: slurmctld on a head, slurmd on the nodes, each a host of its own on this machine."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from launchers import ROOT, Result, run

from . import settings
from .hosts import Host, wait_until
from .namespaces import Space, open_host, open_room

PREFIX = "hvd_ddp-cluster-"
NETWORK = "10.77.0"  # behind a switch of the cluster's own: two clusters may use the same


class Cluster:
    """Hosts `head`, `node1`, `node2`, ... in one room."""

    def __init__(self, directory: Path) -> None:
        """The running cluster whose state is in that directory."""
        self.directory = directory
        state = json.loads((directory / "cluster.json").read_text())
        self.kept: bool = state["kept"]
        self.room = Space(state["room"], ("net", "pid"))
        self._cpus: int = state["cpus"]
        self.hosts = {
            name: Host(name, address, Space(pid), self.room, directory)
            for name, (address, pid) in state["hosts"].items()
        }
        self.head = self.hosts["head"]
        self.nodes = [host for host in self.hosts.values() if host is not self.head]

    @classmethod
    def start(cls, nodes: int = 2, *, keep: bool = False, cpus: int = 4, shared: list[Path] | None = None) -> "Cluster":
        """Start one. It ends with this program, unless `keep`. `shared`: folders below /tmp that all hosts see."""
        sweep()
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
        lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            room = open_room(keep, lock)
        finally:
            os.close(lock)
        addresses = {"head": f"{NETWORK}.100"} | {f"node{i}": f"{NETWORK}.{i}" for i in range(1, nodes + 1)}
        settings.write(directory, addresses)
        mounts = [path.resolve() for path in [directory, ROOT, Path(sys.prefix), *(shared or [])]]
        mounts = [path for path in mounts if path.is_relative_to("/tmp")]
        for command in ("add switch type bridge", "set switch up"):
            subprocess.run(["nsenter", f"--net=/proc/{room.pid}/ns/net", "ip", "link", *command.split()], check=True)
        hosts = {
            name: [address, open_host(room, settings.setup(directory, name, mounts)).pid]
            for name, address in addresses.items()
        }
        state = {"kept": keep, "room": room.pid, "cpus": cpus, "hosts": hosts}
        (directory / "cluster.json").write_text(json.dumps(state))
        cluster = cls(directory)
        cluster._boot()
        return cluster

    def _boot(self) -> None:
        for host in self.hosts.values():
            host.plug("eth0", 10)
        self.configure()
        munge = self.directory / "munge"
        self.head.start(
            "/usr/sbin/munged",
            "--foreground",
            "--force",
            f"--key-file={munge}/key",
            f"--socket={munge}/socket",
            f"--pid-file={munge}/pid",
            f"--seed-file={munge}/seed",
        )
        wait_until((munge / "socket").exists, "munged listens")
        self.head.start("/usr/sbin/slurmctld", "-D")
        for node in self.nodes:
            node.start_sshd()
            node.start_slurmd()
        wait_until(self.idle, "all nodes idle", 30)

    def configure(self, **changes: str) -> None:
        addresses = {host.name: host.address for host in self.hosts.values()}
        text = settings.slurm_conf(self.directory, addresses, self._cpus, changes)
        (self.directory / "slurm/slurm.conf").write_text(text)

    def idle(self) -> bool:
        states = self.run("sinfo", "-h", "-N", "-o", "%T").out.split()
        return states == ["idle"] * len(self.nodes)

    def node(self, name: str) -> Host:
        return self.hosts[name]

    def run(
        self, *command: str, host: str = "head", timeout: float = 60, cwd: Path | None = None, **env: str
    ) -> Result:
        """Run on the head; AssertionError when it takes longer."""
        return run(self.hosts[host].command(list(command), cwd or ROOT), timeout=timeout, **env)

    def down(self) -> None:
        """Kill all and remove the directory."""
        with suppress(ProcessLookupError):
            os.kill(self.room.pid, signal.SIGKILL)
        wait_until(lambda: not self.room.alive(), "the room is gone")
        shutil.rmtree(self.directory)


def clusters() -> list[Cluster]:
    """Those that run."""
    found = []
    for directory in sorted(Path("/tmp").glob(f"{PREFIX}*")):
        if not _dead(directory) and (directory / "cluster.json").exists():
            found.append(Cluster(directory))
    return found


def sweep() -> None:
    """Remove the directories of clusters that ended without `down`."""
    for directory in Path("/tmp").glob(f"{PREFIX}*"):
        if _dead(directory):
            shutil.rmtree(directory, ignore_errors=True)


def _dead(directory: Path) -> bool:
    """A cluster lives as long as the first process of its room, which holds the lock."""
    try:
        with (directory / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return directory.exists() and time.time() - directory.stat().st_mtime > 60  # else about to be locked
    return True
