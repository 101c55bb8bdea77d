"""Cluster: slurmctld on a head, slurmd on the nodes, each a host of its own on this machine."""

import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from launchers import ROOT, Result

from . import settings
from .hosts import Host, call, wait_until
from .jobs import Job
from .namespaces import Space, open_host, open_room
from .programs import Program

PREFIX = "hvd_ddp-cluster-"


class Cluster:
    """Hosts `head`, `node1`, `node2`, ... Slurm's clients run on the head, in `folder` unless told otherwise."""

    def __init__(self, directory: Path, room: Space, hosts: dict[str, Host], options: dict[str, int]) -> None:
        self.directory = directory
        self.hosts = hosts
        self.head = hosts["head"]
        self.nodes = [host for host in hosts.values() if host is not self.head]
        self.folder = directory / "work"
        self.options = options
        self._room = room

    @classmethod
    def start(cls, nodes: int = 2, *, keep: bool = False, cpus: int = 4, shared: list[Path] | None = None) -> "Cluster":
        """Start one. It ends with this program, unless `keep`. `shared`: folders below /tmp that all hosts see."""
        sweep()
        directory, lock = _claim()
        room = open_room(keep, lock)
        os.close(lock)
        try:
            mounts = [path.resolve() for path in [directory, ROOT, Path(sys.prefix), *(shared or [])]]
            hosts = _build(directory, room, nodes, [path for path in mounts if path.is_relative_to("/tmp")])
            cluster = cls(directory, room, hosts, {"keep": keep, "cpus": cpus})
            cluster._boot()
        except BaseException:
            _end(room, directory)
            raise
        return cluster

    @classmethod
    def attach(cls, directory: Path) -> "Cluster":
        """The running cluster that another program started."""
        state = json.loads((directory / "cluster.json").read_text())
        room = Space(state["room"], ("net", "pid"))
        hosts = {name: Host(name, address, Space(pid), room, directory) for name, address, pid in state["hosts"]}
        return cls(directory, room, hosts, state["options"])

    def _boot(self) -> None:
        self._write_configuration({})
        munge = self.directory / "munge"
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        self.head.start("/usr/sbin/munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
        wait_until((munge / "socket").exists, "munged listens")
        self.head.start("/usr/sbin/slurmctld", "-D")
        for node in self.nodes:
            node.boot()
        wait_until(self.idle, "all nodes idle", 30)
        hosts = [[host.name, host.address, host.space.pid] for host in self.hosts.values()]
        state = {"room": self._room.pid, "hosts": hosts, "options": self.options}
        (self.directory / "cluster.json").write_text(json.dumps(state))

    def down(self) -> None:
        """End all processes and remove the directory."""
        _end(self._room, self.directory)
        for space in (self._room, *(host.space for host in self.hosts.values())):
            if space.parent:
                space.parent.wait(10)
                if space.parent.stdin:
                    space.parent.stdin.close()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception: object) -> None:
        self.down()

    def node(self, name: str) -> Host:
        return self.hosts[name]

    def program(self, *command: str, host: str = "head", cwd: Path | None = None, **env: str) -> Program:
        """Start a program beside the test; use it in a `with`."""
        return Program(self.hosts[host].space.command(list(command), cwd or self.folder), **env)

    def run(
        self, *command: str, host: str = "head", timeout: float = 60, cwd: Path | None = None, **env: str
    ) -> Result:
        """Run to the end; AssertionError, and its process group killed, if that takes longer."""
        with self.program(*command, host=host, cwd=cwd, **env) as program:
            return program.wait(timeout)

    def sbatch(self, script: str | Path, *options: str, cwd: Path | None = None, **env: str) -> Job:
        """Submit a script, given as text (bash unless it has a first line of its own) or as the path of a file."""
        folder = cwd or self.folder
        if isinstance(script, str):
            handle, name = tempfile.mkstemp(prefix="job-", suffix=".sh", dir=folder)
            with os.fdopen(handle, "w") as file:
                file.write(script if script.startswith("#!") else f"#!/bin/bash\n{script}")
            script = Path(name)
        result = self.run("sbatch", "--parsable", *options, str(script), cwd=folder, **env)
        assert result.code == 0, result.text
        return Job(self, result.out.strip())

    def scancel(self, *words: str) -> None:
        self.head.call("scancel", *words)

    def scontrol(self, *words: str) -> str:
        return self.head.call("scontrol", *words)

    def configure(self, **changes: str) -> None:
        """Change lines of slurm.conf: `SlurmdTimeout="10"`."""
        self._write_configuration(changes)
        self.scontrol("reconfigure")

    def _write_configuration(self, changes: dict[str, str]) -> None:
        addresses = {host.name: host.address for host in self.hosts.values()}
        text = settings.slurm_conf(self.directory, addresses, self.options["cpus"], changes)
        (self.directory / "slurm/slurm.conf").write_text(text)

    def idle(self) -> bool:
        """Every node could take a job, and none is left in the queue."""
        states = self.run("sinfo", "-h", "-N", "-o", "%T").out.split()
        return states == ["idle"] * len(self.nodes) and not self.run("squeue", "-h").out

    def controller_log(self) -> str:
        return (self.directory / "head/slurmctld.log").read_text(errors="replace")


def _claim() -> tuple[Path, int]:
    """A new directory and its locked file; it gets its name only then, so that no sweep takes it for a dead one."""
    new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir="/tmp"))
    lock = os.open(new / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return new.rename(new.with_name(new.name[1:])), lock


def _build(directory: Path, room: Space, nodes: int, mounts: list[Path]) -> dict[str, Host]:
    """The switch, and hosts with their cables."""
    addresses = {"head": settings.GATEWAY} | {f"node{i}": f"{settings.NETWORK}.{i}" for i in range(1, nodes + 1)}
    settings.write(directory, addresses)
    for words in ("add switch type bridge", "set switch up"):
        call(["nsenter", f"--net=/proc/{room.pid}/ns/net", "ip", "link", *words.split()])
    hosts = {}
    for name, address in addresses.items():
        space = open_host(room, settings.setup(directory, name, mounts))
        hosts[name] = Host(name, address, space, room, directory)
        hosts[name].plug()
    return hosts


def clusters() -> list[Cluster]:
    """Those that run, the newest last."""
    directories = sorted(Path("/tmp").glob(f"{PREFIX}*"), key=lambda path: path.stat().st_mtime)
    return [Cluster.attach(path) for path in directories if not _dead(path) and (path / "cluster.json").exists()]


def sweep() -> None:
    """Remove the directories of clusters that ended without down()."""
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
        pass  # another sweep is at it
    return True


def _end(room: Space, directory: Path) -> None:
    with suppress(ProcessLookupError):
        os.kill(room.pid, signal.SIGKILL)
    wait_until(lambda: _dead(directory), "the room is gone")
    shutil.rmtree(directory, ignore_errors=True)  # a sweep may be at it
