"""On two hosts under Slurm that are set up as hosts often are: it trains, over the network between them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster.slurm import Cluster
from rundir import summary
from two_nodes import cluster_for, ends, nothing_left, submit

NETWORK = "10.77.0."


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Debian's /etc/hosts, a bridge of the same address on each node, a dead interface first, names that differ."""
    with odd_cluster(tmp_path_factory) as cluster:
        cluster.node("node2").rename_interface("ib7")
        yield cluster


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The same, but for the names: variables have the same value on all nodes."""
    with odd_cluster(tmp_path_factory) as cluster:
        yield cluster


@contextmanager
def odd_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_for(tmp_path_factory) as cluster:
        for number, node in enumerate(cluster.nodes, 1):
            own = f"127.0.0.1 localhost\n127.0.1.1 {node.name}\n"
            others = [f"{host.address} {host.name}\n" for host in cluster.hosts.values() if host is not node]
            node.write_hosts(own + "".join(others))
            assert node.call("getent", "hosts", node.name).split()[0] == "127.0.1.1"
            node.add_interface("docker0", "172.17.0.1/16")
            node.add_interface("dead", f"192.168.44.{number}/24")
            assert "192.168.44" in node.call("hostname", "-I").split()[0] + node.call("hostname", "-I").split()[1]
        yield cluster


def trains(cluster: Cluster, folder: Path, *options: str, **env: str) -> list[dict[str, Any]]:
    """What each rank saw of itself, by slow_models:Shows, when it has done all its steps."""
    job = submit(cluster, folder, "--model", "slow_models:Shows", "--max-steps", "12", *options, **env)
    assert ends(job, 90) == "COMPLETED", job.log
    assert summary(folder / "run")["status"] == "finished"
    nothing_left(cluster)
    return [json.loads((folder / f"shows-{rank}.json").read_text()) for rank in (0, 1)]


def check_network(seen: list[dict[str, Any]], backend: str, interfaces: tuple[str, str]) -> None:
    """Only the network between the nodes carries anything, and libraries were told its interface."""
    name = {"ddp": "GLOO_SOCKET_IFNAME", "horovod": "HOROVOD_GLOO_IFACE"}[backend]
    assert tuple(rank["environ"][name] for rank in seen) == interfaces
    for rank in seen:
        assert rank["connections"], "else it shows nothing"
        assert [pair for pair in rank["connections"] if not all(end.startswith(NETWORK) for end in pair)] == []
    if backend == "horovod":
        assert {rank["environ"]["HOROVOD_GLOO_RENDEZVOUS_ADDR"] for rank in seen} == {f"{NETWORK}1"}


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_odd_hosts(odd: Cluster, backend: str, tmp_path: Path) -> None:
    check_network(trains(odd, tmp_path, "--backend", backend), backend, ("eth0", "ib7"))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
@pytest.mark.parametrize(
    "wish",
    [
        "NCCL_SOCKET_IFNAME=^lo,docker",
        "NCCL_SOCKET_IFNAME=^lo,docker,dead",
        "NCCL_SOCKET_IFNAME=eth",
        "NCCL_SOCKET_IFNAME==eth0",
        "GLOO_SOCKET_IFNAME=eth0",
        "HOROVOD_GLOO_IFACE=eth0",
    ],
)
def test_interfaces_that_the_user_names(alike: Cluster, backend: str, wish: str, tmp_path: Path) -> None:
    name, _, value = wish.partition("=")
    check_network(trains(alike, tmp_path, "--backend", backend, **{name: value}), backend, ("eth0", "eth0"))


@pytest.mark.full
def test_names_that_differ_in_the_user_s_own_words(odd: Cluster, tmp_path: Path) -> None:
    check_network(trains(odd, tmp_path, NCCL_SOCKET_IFNAME="eth,ib"), "ddp", ("eth0", "ib7"))


@pytest.mark.parametrize(
    "wish",
    [
        "GLOO_SOCKET_IFNAME=ib9",
        pytest.param("NCCL_SOCKET_IFNAME==eth", marks=pytest.mark.full),
        pytest.param("NCCL_SOCKET_IFNAME=^eth,docker,dead,ib", marks=pytest.mark.full),
    ],
)
def test_no_interface_has_that_name(odd: Cluster, wish: str, tmp_path: Path) -> None:
    name, _, value = wish.partition("=")
    job = submit(odd, tmp_path, "--start-timeout", "20", **{name: value})
    assert ends(job, 60) == "FAILED", job.log
    assert job.exit_code == 2, job.log
    said = [line for line in job.log.splitlines() if line.startswith("hvd_ddp: ")]
    assert len(said) == 1, job.log
    assert f"{name} is `{value}`, which names no interface of `node1`" in said[0]
    assert "eth0 (10.77.0.1)" in said[0]
    assert not (tmp_path / "run").exists()
