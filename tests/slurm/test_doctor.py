"""doctor across hosts under a real Slurm: faults of one host or rank are found, and named with it."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster.slurm import Cluster
from launchers import ROOT, Result
from two_nodes import cluster_for, nothing_left

Checks = list[dict[str, Any]]
DOCTOR = [sys.executable, "-m", "hvd_ddp", "doctor", "--json"]
PLUGINS = "/usr/lib/x86_64-linux-gnu/slurm-wlm"
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}

# A minute ahead, for one process: the hosts of the cluster have one clock.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += 60;
    return result;
}
"""
# torch as it is, but for its version.
OTHER_TORCH = """
import sys
sys.path.remove(next(path for path in sys.path if path.endswith("other_torch")))
del sys.modules["torch"]
import torch
torch.__version__ = "2.13.0"
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_for(tmp_path_factory, 3) as cluster:
        yield cluster


def doctor(
    cluster: Cluster, folder: Path, *options: str, srun: str = "-N3", before: str = "", timeout: float = 120, **env: str
) -> tuple[Result, Checks]:
    """On one rank a node, each of which runs the shell words `before` first; all that rank 0 said."""
    tasks = ["bash", "-c", f'{before}\nexec "$@"', "task", *DOCTOR, *options]
    result = cluster.run("srun", *srun.split(), *tasks, cwd=folder, timeout=timeout, **{**ENV, **env})
    nothing_left(cluster)
    lines = [line for line in result.out.splitlines() if line.startswith('{"checks"')]
    assert len(lines) == 1, result.text
    return result, json.loads(lines[0])["checks"]


def found(checks: Checks, name: str, status: str) -> Checks:
    return [check for check in checks if (check["name"], check["status"]) == (name, status)]


def bad(checks: Checks) -> set[tuple[str, str, int | None]]:
    return {(check["name"], check["status"], check["rank"]) for check in checks if check["status"] != "ok"}


@contextmanager
def changed(cluster: Cluster, node: str, there: str, back: str) -> Iterator[None]:
    """Shell words on that node, and those that undo them."""
    cluster.node(node).call("sh", "-ec", there)
    try:
        yield
    finally:
        cluster.node(node).call("sh", "-ec", back)


def test_a_sound_cluster(three: Cluster, tmp_path: Path) -> None:
    result, checks = doctor(three, tmp_path)
    assert result.code == 0, result.text
    assert bad(checks) == set()
    for name in ("ranks", "versions", "clocks", "ways between hosts", "common files", "scheduler", "srun types"):
        assert len(found(checks, name, "ok")) == 1, name
    for name in ("all_reduce ddp", "all_reduce horovod"):
        (check,) = found(checks, name, "ok")
        assert check["detail"].startswith("3 ranks over gloo on cpu: ") and "the sum is right" in check["detail"]
    for name in ("launcher", "python", "torch", "horovod", "mpi", "host", "interfaces"):
        assert [check["rank"] for check in found(checks, name, "ok")] == [0, 1, 2], name
    assert "pmix" in found(checks, "srun types", "ok")[0]["detail"]
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_faults_of_single_hosts_and_ranks(three: Cluster, tmp_path: Path) -> None:
    """Eight at once, each found and named."""
    (tmp_path / "clock.c").write_text(CLOCK)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", "clock.so", "clock.c", "-ldl"], cwd=tmp_path, check=True, timeout=60
    )
    (tmp_path / "other_torch/torch").mkdir(parents=True)
    (tmp_path / "other_torch/torch/__init__.py").write_text(OTHER_TORCH)
    before = (
        f"[ $SLURM_PROCID = 2 ] && export LD_PRELOAD={tmp_path}/clock.so\n"
        f"[ $SLURM_PROCID = 1 ] && export PYTHONPATH={tmp_path}/other_torch:$PYTHONPATH"
    )
    loopback = "cp /etc/hosts /tmp/hosts; echo '127.0.0.1 localhost\n127.0.1.1 node2' > /etc/hosts"
    data = "mkdir /tmp/data; mount -t tmpfs tmpfs /tmp/data; touch /tmp/data/x; mount -o remount,ro /tmp/data"
    no_pmix = f"cp -a {PLUGINS} /tmp/plugins; rm /tmp/plugins/mpi_pmix*; mount --bind /tmp/plugins {PLUGINS}"
    with (
        changed(three, "node2", loopback, "cat /tmp/hosts > /etc/hosts"),
        changed(three, "node3", "mount -o remount,size=8m /dev/shm", "mount -o remount,size=1g /dev/shm"),
        changed(three, "node3", data, "umount /tmp/data; rmdir /tmp/data"),
        changed(three, "node1", no_pmix, f"umount {PLUGINS}"),
    ):
        result, checks = doctor(three, tmp_path, "--data-dir", "/tmp/data", before=before)
    assert result.code == 1
    wanted = {
        ("clocks", "failure", 2): "node3 is 60.0 s ahead of node1",
        ("versions", "failure", 1): "2.13.0 on rank 1",
        ("horovod", "failure", 1): "here is torch 2.13.0",
        ("host", "warning", 1): "node2 is 127.0.1.1: loopback",
        ("/dev/shm", "warning", 2): "8 MiB free for 1 rank(s) of node3",
        ("data directory", "failure", 0): "/tmp/data can't be read: No such file or directory",
        ("data directory", "failure", 1): "/tmp/data can't be read: No such file or directory",
        ("data directory", "warning", 2): "it may not be written, and nothing is packed",
        ("srun types", "warning", 0): "no pmix, with which srun starts Open MPI",
        ("data directory", "failure", None): "holds not the same on node1, node2 and node3",
    }
    assert bad(checks) == set(wanted)
    for (name, status, rank), words in wanted.items():
        (check,) = [check for check in found(checks, name, status) if check["rank"] == rank]
        assert words in check["detail"], check
        assert check["remedy"], check
    assert found(checks, "all_reduce ddp", "ok"), "which works all the same"


def test_ports_are_closed_between_two_hosts(three: Cluster, tmp_path: Path) -> None:
    """As by a firewall that drops without a word what comes from node3, but for the ports of services."""
    close = "ip rule add pref 100 lookup local; ip rule del pref 0"  # rules before it count for what comes in
    close += "; ip rule add pref 10 from 10.77.0.3 ipproto tcp dport 30000-60999 blackhole"
    with changed(three, "node2", close, "ip rule del pref 10; ip rule add pref 0 lookup local; ip rule del pref 100"):
        result, checks = doctor(three, tmp_path, "--start-timeout", "30")
    assert result.code == 1
    (check,) = found(checks, "ways between hosts", "failure")
    assert "node3 to node2 at 10.77.0.2: no answer: packets are dropped" in check["detail"]
    assert "Open all TCP ports between the nodes" in check["remedy"]
    assert "node1" not in check["detail"]
    assert found(checks, "ranks", "ok")
    assert found(checks, "all_reduce", "warning")[0]["detail"] == "not tried, because of ways between hosts"


def test_rank_0_is_behind_a_wall(three: Cluster, tmp_path: Path) -> None:
    with changed(three, "node2", "ip route add blackhole 10.77.0.1", "ip route del blackhole 10.77.0.1"):
        result, checks = doctor(three, tmp_path, "--start-timeout", "15")
    assert result.code == 1
    (check,) = found(checks, "ranks", "failure")
    assert check["detail"] == "1 of 3 did not come: rank 1 (on node2)"
    assert "rank 1 on node2: ranks: rank 0 listens on 10.77.0.1:" in result.err
    assert found(checks, "clocks", "ok") and found(checks, "ways between hosts", "ok"), "of those that came"
    assert found(checks, "all_reduce", "warning")[0]["detail"] == "not tried, because of ranks"


def test_no_common_files(three: Cluster, tmp_path: Path) -> None:
    """Each host has a /tmp of its own."""
    result, checks = doctor(three, tmp_path, "--start-timeout", "15", "--run-dir", "/tmp/runs")
    assert result.code == 1
    assert found(checks, "ranks", "failure")[0]["detail"] == "2 of 3 did not come: ranks 1-2 (on node2, node3)"
    for rank in (1, 2):
        assert f"rank {rank} on node{rank + 1}: ranks: rank 0 left no word where this rank looks for it" in result.err


@pytest.mark.full
def test_common_files_where_the_launcher_needs_none(three: Cluster, tmp_path: Path) -> None:
    """torchrun has a store of its own: all ranks come."""
    torchrun = f"{Path(sys.executable).parent}/torchrun --nnodes 3 --nproc-per-node 1 --rdzv-backend c10d"
    words = [
        *torchrun.split(),
        "--rdzv-endpoint",
        "node1:29400",
        *DOCTOR[1:],
        "--timeout",
        "30",
        "--run-dir",
        "/tmp/runs",
    ]
    result = three.run("srun", "-N3", *words, cwd=tmp_path, timeout=150, **ENV)
    assert result.code != 0
    (line,) = [line for line in result.out.splitlines() if line.startswith('{"checks"')]
    checks = json.loads(line)["checks"]
    (check,) = found(checks, "common files", "failure")
    assert check["detail"] == "what rank 0 writes into /tmp is not seen on node2, node3"
    assert found(checks, "ranks", "ok")
    nothing_left(three)


@pytest.mark.full
def test_rank_0_dies(three: Cluster, tmp_path: Path) -> None:
    """While all are asked: the others leave."""
    tasks = '[ $SLURM_PROCID = 0 ] && { "$@" & sleep 4; kill -9 $!; exit 9; }\nexec "$@"'
    began = time.monotonic()
    result = three.run("srun", "-N3", "bash", "-c", tasks, "task", *DOCTOR, cwd=tmp_path, timeout=60, **ENV)
    assert result.code == 9 and result.out == ""
    assert time.monotonic() - began < 30
    nothing_left(three)


@pytest.mark.full
def test_a_rank_that_never_starts(three: Cluster, tmp_path: Path) -> None:
    before = "[ $SLURM_PROCID = 2 ] && exec sleep 40"
    result, checks = doctor(three, tmp_path, "--start-timeout", "15", before=before)
    assert result.code == 1
    assert found(checks, "ranks", "failure")[0]["detail"] == "1 of 3 did not come: rank 2 (on node3)"


@pytest.mark.full
def test_an_interface_that_is_not_there(three: Cluster, tmp_path: Path) -> None:
    three.node("node3").rename_interface("ib7")
    try:
        result, checks = doctor(three, tmp_path, "--start-timeout", "30", GLOO_SOCKET_IFNAME="eth0")
    finally:
        three.node("node3").rename_interface("eth0")
    assert result.code == 1
    (check,) = found(checks, "interfaces", "failure")
    assert check["rank"] == 2
    assert "GLOO_SOCKET_IFNAME is `eth0`, which names no interface of `node3`" in check["detail"]
    assert check["remedy"] == "Set it to one of these, or unset it."


def test_the_batch_shell_is_no_step(three: Cluster, tmp_path: Path) -> None:
    job = three.sbatch(" ".join(DOCTOR), "-N3", cwd=tmp_path, **ENV)
    assert job.wait(60) == "FAILED" and job.exit_code == 1, job.log
    checks = json.loads(job.log)["checks"]
    (check,) = found(checks, "launcher", "failure")
    assert "SLURM_JOB_NUM_NODES is `3`, but this is the batch shell" in check["detail"]
    assert "srun" in check["remedy"]
