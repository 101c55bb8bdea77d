"""The cluster itself: hosts of their own, Slurm on them, what can be done to them, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launchers import ROOT, environment

from .hosts import wait_until
from .slurm import PREFIX, Cluster, clusters, sweep

pytestmark = pytest.mark.timeout(60)

SUM = """
import socket
from mpi4py import MPI
print(socket.gethostname(), MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1), flush=True)
"""
# How long node2 takes to send node1 a megabyte; both run this.
SEND = """
import socket, sys, time
if socket.gethostname() == "node1":
    server = socket.create_server(("", 7777))
    print("listens", flush=True)
    peer, _ = server.accept()
    begin, got = time.monotonic(), 0
    while data := peer.recv(1 << 16):
        got += len(data)
    print(got, time.monotonic() - begin, flush=True)
else:
    socket.create_connection(("node1", 7777)).sendall(bytes(1_000_000))
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """One for the tests that leave it as it was."""
    with Cluster.start(2) as cluster:
        yield cluster


def test_hosts_are_hosts_of_their_own(shared: Cluster) -> None:
    facts = {}
    for node in shared.nodes:
        node.call("sh", "-ec", f"echo {node.name} >/tmp/mine; echo {node.name} >/dev/shm/mine")
        name, addresses, interfaces = node.call("sh", "-ec", "hostname; hostname -I; ls /sys/class/net").split("\n", 2)
        facts[name] = addresses.split()
        assert interfaces.split() == ["eth0", "lo"]
    assert facts == {"node1": ["10.77.0.1"], "node2": ["10.77.0.2"]}
    for node in shared.nodes:
        assert node.call("cat", "/tmp/mine", "/dev/shm/mine").split() == [node.name] * 2
        assert node.call("getent", "hosts", "node1", "node2").split() == ["10.77.0.1", "node1", "10.77.0.2", "node2"]
    assert not Path("/tmp/mine").exists()


def test_srun_reaches_all_nodes(shared: Cluster) -> None:
    result = shared.run("srun", "-N2", "hostname", timeout=20)
    assert sorted(result.out.split()) == ["node1", "node2"], result


def test_mpi_across_hosts_under_srun(shared: Cluster) -> None:
    options = ["-N2", "--ntasks-per-node=2", "--mpi=pmix"]
    result = shared.run("srun", *options, sys.executable, "-c", SUM, timeout=40)
    assert result.code == 0, result
    assert sorted(result.out.splitlines()) == ["node1 10", "node1 10", "node2 10", "node2 10"], result


def test_mpirun_goes_through_ssh(shared: Cluster) -> None:
    assert shared.run("ssh", "node2", "hostname", host="node1", timeout=20).out == "node2\n"
    result = shared.run("mpirun", "-H", "node1,node2", sys.executable, "-c", SUM, host="node1", timeout=40)
    assert result.code == 0, result
    assert sorted(result.out.splitlines()) == ["node1 3", "node2 3"], result


def test_a_command_that_hangs_is_killed(shared: Cluster) -> None:
    with pytest.raises(AssertionError, match=r"still running after 1 s(.|\n)*before"):
        shared.run("sh", "-c", "echo before; sleep 100", timeout=1)
    wait_until(lambda: not shared.head.pids(), "sleep is gone")


def test_a_job_has_a_state_an_exit_code_and_a_log(shared: Cluster) -> None:
    job = shared.sbatch("echo $WORD; srun hostname; exit 7", "-N2", WORD="hello")
    assert job.wait(20) == "FAILED"
    assert job.exit_code == 7
    assert sorted(job.log.split()) == ["hello", "node1", "node2"]
    assert job.requeues == 0
    job = shared.sbatch("true")
    assert (job.wait(20), job.exit_code) == ("COMPLETED", 0)
    job = shared.sbatch("kill -USR1 $$")
    assert (job.wait(20), job.exit_code) == ("FAILED", 128 + signal.SIGUSR1)


def test_a_job_is_cancelled(shared: Cluster) -> None:
    job = shared.sbatch("sleep 100")
    job.wait_state("RUNNING", 20)
    job.cancel()
    assert job.wait(20) == "CANCELLED"


def test_a_requeued_job_starts_again_soon(shared: Cluster) -> None:
    job = shared.sbatch("echo start ${SLURM_RESTART_COUNT:-0}; sleep 100", "--open-mode=append")
    job.wait_log("start 0", 20)
    job.requeue()
    job.wait_log("start 1", 30)
    assert job.requeues == 1
    job.cancel()
    job.wait(20)


def test_a_cable_is_cut_and_mended(shared: Cluster) -> None:
    node = shared.node("node2")
    ssh = ["ssh", "-o", "ConnectTimeout=1", "node2", "hostname"]
    node.cut()
    assert shared.run(*ssh, timeout=20).code == 255
    node.mend()
    assert shared.run(*ssh, timeout=20).out == "node2\n"
    assert sorted(shared.run("srun", "-N2", "hostname", timeout=20).out.split()) == ["node1", "node2"]


def transfer(cluster: Cluster) -> float:
    """Seconds for a megabyte from node2 to node1."""
    program = [sys.executable, "-c", SEND]
    with cluster.program(*program, host="node1") as receiver:
        wait_until(lambda: "listens" in receiver.result.out, "node1 listens")
        assert cluster.run(*program, host="node2", timeout=30).code == 0
        got, seconds = receiver.wait(30).out.split()[1:]
    assert int(got) == 1_000_000
    return float(seconds)


def test_a_slow_cable_is_slow(shared: Cluster) -> None:
    node = shared.node("node2")
    fast = transfer(shared)
    node.slow(mbit=4)  # 2 s
    slow = transfer(shared)
    node.unslow()
    again = transfer(shared)
    assert slow > 1
    assert fast < slow / 2
    assert again < slow / 2


def test_processes_of_a_node(shared: Cluster) -> None:
    node1, node2 = shared.nodes
    job = shared.sbatch("srun --kill-on-bad-exit=1 sleep 1000", "-N2", "--ntasks-per-node=2")
    wait_until(lambda: [process.name for process in node2.processes()] == ["sleep", "sleep"], "node2 sleeps")
    process = node2.processes()[0]
    assert process.pid in node2.pids()
    assert process.command == "/usr/bin/sleep 1000"
    assert process.inside != process.pid
    node2.stop()
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it is stopped")
    node2.resume()
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING, "it goes on")
    os.kill(process.pid, signal.SIGKILL)
    assert job.wait(20) == "FAILED"
    wait_until(lambda: not node1.pids() and not node2.pids(), "nothing is left")


def test_slurmd_dies_and_comes_back(shared: Cluster) -> None:
    node = shared.node("node2")
    node.kill_slurmd()
    wait_until(lambda: "slurmd" not in [process.name for process in node.space.processes()], "slurmd is dead")
    node.start_slurmd()
    wait_until(lambda: shared.run("srun", "-w", "node2", "hostname", timeout=20).out == "node2\n", "it is back")


def test_settings_change(shared: Cluster) -> None:
    shared.configure(KillWait="3")
    assert "KillWait                = 3 sec" in shared.scontrol("show", "config")


def test_interfaces_and_names(cluster: Cluster) -> None:
    """The fixture gives three nodes; this one is this test's alone."""
    node1, node2, node3 = cluster.nodes
    node1.add_interface("dead", "192.168.44.1/24")
    node2.rename_interface("ib7")
    node3.write_hosts(f"127.0.0.1 localhost\n127.0.1.1 node3\n{node1.address} node1\n{node2.address} node2\n")
    assert [line.split()[1] for line in node1.call("ip", "-o", "-4", "address").splitlines()] == ["lo", "dead", "eth0"]
    assert node1.call("hostname", "-I").split() == ["192.168.44.1", "10.77.0.1"]
    assert [line.split()[1] for line in node2.call("ip", "-o", "-4", "address").splitlines()] == ["lo", "ib7"]
    assert node3.call("getent", "hosts", "node3").split() == ["127.0.1.1", "node3"]
    assert sorted(cluster.run("srun", "-N3", "hostname", timeout=20).out.split()) == ["node1", "node2", "node3"]


def test_a_frozen_node_and_a_crashed_one(cluster: Cluster) -> None:
    node = cluster.node("node3")
    node.freeze()
    assert cluster.run("ssh", "-o", "ConnectTimeout=1", "node3", "true", timeout=20).code == 255
    node.thaw()
    assert cluster.run("ssh", "node3", "hostname", timeout=20).out == "node3\n"
    node.crash()
    wait_until(lambda: not node.space.processes(), "it is dead")
    node.boot()
    wait_until(lambda: cluster.run("srun", "-w", "node3", "hostname", timeout=20).out == "node3\n", "it is back")


def traces() -> dict[str, str]:
    """What a cluster could leave on this machine, but for processes."""
    commands = {"links": "ip -o link | cut -d: -f2", "namespaces": "ip netns", "mounts": "cat /proc/mounts"}
    return {name: subprocess.check_output(["sh", "-c", line], text=True, timeout=20) for name, line in commands.items()}


def descendants(cluster: Cluster) -> list[int]:
    return [
        pid for host in cluster.hosts.values() for pid in (host.space.pid, *(p.pid for p in host.space.processes()))
    ]


def test_nothing_is_left() -> None:
    """Two clusters side by side, one with a frozen node and a running job."""
    before = traces()
    with Cluster.start(1) as other, Cluster.start(2) as cluster:
        job = cluster.sbatch("sleep 1000", "--output=/dev/null")
        job.wait_state("RUNNING", 20)
        cluster.node("node2").freeze()
        assert other.idle()
        assert other.directory != cluster.directory
        pids = [*descendants(other), *descendants(cluster)]
        assert len(pids) >= 15
    assert traces() == before
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "all processes are gone")
    assert not other.directory.exists()
    assert not cluster.directory.exists()


def test_a_killed_owner_takes_its_cluster_along() -> None:
    code = (
        "import time; from cluster.slurm import Cluster; print(Cluster.start(1).directory, flush=True); time.sleep(100)"
    )
    env = environment(PYTHONPATH=f"{ROOT}/tests")
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as owner:
        directory = Path(owner.stdout.readline().strip())
        pids = descendants(Cluster.attach(directory))
        owner.kill()
    assert directory.name.startswith(PREFIX)
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "all processes are gone")
    sweep()
    assert not directory.exists()


def test_by_hand() -> None:
    def by_hand(*words: str) -> str:
        command = [sys.executable, "-m", "tests.cluster", *words]
        return subprocess.check_output(command, cwd=ROOT, env=environment(), text=True, timeout=30)

    others = {cluster.directory for cluster in clusters()}
    directory = Path(by_hand("up", "--nodes", "2").split()[-1])
    try:
        assert by_hand("sh", "--cluster", str(directory), "--", "hostname") == "node1\n"
        out = by_hand("sh", "--cluster", str(directory), "--node", "node2", "--", "srun", "-N2", "hostname")
        assert sorted(out.split()) == ["node1", "node2"]
    finally:
        by_hand("down", "--cluster", str(directory))
    assert not directory.exists()
    assert {path for path in others if not path.exists()} == set()
