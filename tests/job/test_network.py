"""Which addresses of this host count, by the interfaces that the user names."""

import json
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
from launchers import environment

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job import network
from hvd_ddp.job.network import addresses, interface_of, source_address

Stats = namedtuple("Stats", "isup")
Entry = namedtuple("Entry", "family address")

# name: up, IPv4 addresses. In the system's order, the names chosen so that prefixes bite.
HOST = {
    "lo": (True, ["127.0.0.1"]),
    "usb0": (True, ["169.254.3.1"]),
    "docker0": (False, ["172.17.0.1"]),
    "eth0": (True, ["10.0.0.7"]),
    "eth1": (True, ["10.1.0.7", "10.1.0.8"]),
    "eth10": (True, ["10.2.0.7"]),
    "ib0": (True, ["192.168.9.7"]),
}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of the tests has one interface: this one has several."""
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: Stats(up) for name, (up, _) in HOST.items()})
    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {
            name: [*(Entry(socket.AF_INET, text) for text in texts), Entry(socket.AF_INET6, "fe80::1")]
            for name, (_, texts) in HOST.items()
        },
    )
    monkeypatch.setattr(network, "_default_routes", set)


@pytest.mark.parametrize(
    ("value", "interfaces"),
    [
        # docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
        ("eth", ["eth0", "eth1", "eth10"]),
        ("=eth0", ["eth0"]),
        ("=eth0,eth1", ["eth0", "eth1"]),
        ("^eth", ["ib0", "usb0"]),
        ("^=eth1", ["eth0", "eth10", "ib0", "usb0"]),
        ("^=eth1,ib0", ["eth0", "eth10", "usb0"]),
        ("^docker,lo,usb,eth", ["ib0"]),
        ("ib,eth1", ["eth1", "eth10", "ib0"]),
        ("ib0", ["ib0"]),
        # names in full, as Gloo wants them: first, whatever else they are the beginning of
        ("eth10,eth1", ["eth1", "eth10"]),
        ("eth1", ["eth1", "eth10"]),
        # nothing documented: as NCCL's source does
        (",ib0,", ["ib0"]),
        ("=", ["eth0", "eth1", "eth10", "ib0", "usb0"]),
    ],
)
@pytest.mark.parametrize("variable", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"])
@pytest.mark.usefixtures("host")
def test_interfaces_that_the_user_names(variable: str, value: str, interfaces: list[str]) -> None:
    assert addresses((variable, value)) == [address for name in interfaces for address in HOST[name][1]]


@pytest.mark.usefixtures("host")
def test_without_a_wish_all_that_others_may_reach() -> None:
    assert addresses() == ["10.0.0.7", "10.1.0.7", "10.1.0.8", "10.2.0.7", "192.168.9.7", "169.254.3.1"]
    assert addresses(None) == addresses()


@pytest.mark.usefixtures("host")
def test_the_default_route_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_default_routes", lambda: {"ib0"})
    assert addresses()[:2] == ["192.168.9.7", "10.0.0.7"]
    assert addresses(("NCCL_SOCKET_IFNAME", "eth1,ib"))[:2] == ["10.1.0.7", "10.1.0.8"], "named in full"
    assert addresses()[-1] == "169.254.3.1"


@pytest.mark.parametrize("value", ["wlan0", "=eth", "lo", "docker0", "^", "^eth,ib,usb"])
@pytest.mark.usefixtures("host")
def test_none_of_these(value: str) -> None:
    with pytest.raises(HvdDDPError) as caught:
        addresses(("NCCL_SOCKET_IFNAME", value))
    text = str(caught.value)
    for word in (f"NCCL_SOCKET_IFNAME is `{value}`", f"`{socket.gethostname()}`", "eth10 (10.2.0.7)", "unset it"):
        assert word in text, text
    assert "docker0 (" not in text, "it is down"
    assert "lo (" not in text


def test_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"lo": Stats(True)})
    for wanted in (None, ("NCCL_SOCKET_IFNAME", "lo")):
        with pytest.raises(HvdDDPError, match="no address but loopback"):
            addresses(wanted)


# This machine itself


def test_of_this_machine() -> None:
    up = [name for name, stats in psutil.net_if_stats().items() if stats.isup and name != "lo"]
    for address in addresses():
        name = interface_of(address)
        assert name in up
        assert address in addresses(("NCCL_SOCKET_IFNAME", f"={name}"))


def test_default_routes() -> None:
    lines = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    assert network._default_routes() == {line[0] for line in lines if int(line[1], 16) == 0}


def test_two_interfaces_and_a_default_route() -> None:
    """The kernel's own tables, in a network namespace with two real interfaces."""
    say = (
        "import json; from hvd_ddp.job.network import addresses as a, source_address as s; "
        "print(json.dumps([a(), a(('GLOO_SOCKET_IFNAME', 'first')), s('10.9.0.7', 1), s('8.8.8.8', 1)]))"
    )
    script = (
        "ip link set lo up && ip link add first type veth peer name second && "
        "ip addr add 10.9.0.1/24 dev first && ip addr add 10.9.1.1/24 dev second && "
        "ip link set first up && ip link set second up && ip route add default via 10.9.1.2 && "
        f'{sys.executable} -c "$0"'
    )
    line = ["unshare", "--net", "sh", "-c", script, say]
    result = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=60)
    if "unshare: " in result.stderr:
        pytest.skip("no right to make a network namespace")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [["10.9.1.1", "10.9.0.1"], ["10.9.0.1"], "10.9.0.1", "10.9.1.1"]


def test_source_address() -> None:
    assert source_address("127.0.0.1", 9) == "127.0.0.1"
    assert source_address("localhost", 9) == "127.0.0.1"
    for address in addresses():
        assert source_address(address, 9) == address


def test_no_way_there() -> None:
    with pytest.raises(HvdDDPError, match=r"no way to `no-such-host\.invalid`"):
        source_address("no-such-host.invalid", 9)
