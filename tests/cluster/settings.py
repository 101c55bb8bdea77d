"""The files that daemons and hosts of the cluster read: keys, slurm.conf, ssh, /etc/hosts."""

import os
import subprocess
from pathlib import Path

NETWORK = "10.77.0"  # behind a switch of the cluster's own: two clusters may use the same
GATEWAY = f"{NETWORK}.100"  # the head; it forwards nothing: what is sent elsewhere is lost without an answer

# What Cluster.configure() may change. KillWait is 30 and SlurmdTimeout 300 by default: here less, so that a test sees
# both in little time. A requeued job may start again when the credential of its first start is certain to have expired
# (cred_expire, 120 s by default; man slurm.conf, AuthInfo).
DEFAULTS = {
    "AuthInfo": "cred_expire=5",
    "KillWait": "10",
    "SlurmdTimeout": "60",
    "MessageTimeout": "5",
    "OverTimeLimit": "0",
    "ReturnToService": "2",
    "MinJobAge": "100000",
    "SchedulerParameters": "sched_interval=1,bf_interval=1,batch_sched_delay=0",
}


def slurm_conf(directory: Path, addresses: dict[str, str], cpus: int, changes: dict[str, str]) -> str:
    """slurm.conf for the hosts of `addresses`, the first of which is the head."""
    (head, head_address), *nodes = addresses.items()
    settings = {
        "ClusterName": "cluster",
        "SlurmctldHost": f"{head}({head_address})",
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "MpiDefault": "none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",  # by default memory counts too, and a job takes all of a node
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "JobCompType": "jobcomp/none",
        "SlurmdParameters": "config_overrides",
        "StateSaveLocation": f"{directory}/head/state",
        "SlurmdSpoolDir": f"{directory}/%n/spool",
        "SlurmctldPidFile": f"{directory}/head/slurmctld.pid",
        "SlurmdPidFile": f"{directory}/%n/slurmd.pid",
        "SlurmctldDebug": "verbose",
        "SlurmdDebug": "verbose",
        **DEFAULTS,
        **changes,
    }
    settings["AuthInfo"] += f",socket={directory}/munge/socket"
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [f"NodeName={node} NodeAddr={address} CPUs={cpus} State=UNKNOWN" for node, address in nodes]
    lines += ["PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]
    return "\n".join(lines) + "\n"


def write(directory: Path, addresses: dict[str, str]) -> None:
    """Folders, keys and what every host has in common, but for slurm.conf."""
    for name in ("munge", "slurm", "ssh", "work"):
        (directory / name).mkdir()
    hosts = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())
    (directory / "empty").touch()
    for name in addresses:
        for folder in ("tmp", "sys", "root", "spool", "state"):
            (directory / name / folder).mkdir(parents=True)
        (directory / name / "hosts").write_text(hosts)
    key = directory / "munge/key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    _write_ssh(directory / "ssh")


def _write_ssh(folder: Path) -> None:
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=30)
    (folder / "known_hosts").write_text(f"* {(folder / 'host.pub').read_text()}")
    (folder / "config").write_text(
        f"IdentityFile {folder}/user\n"
        f"GlobalKnownHostsFile {folder}/known_hosts\n"
        "UserKnownHostsFile /dev/null\n"
        "StrictHostKeyChecking yes\n"
        "BatchMode yes\n"
        "LogLevel ERROR\n"
    )
    (folder / "sshd").write_text(
        f"HostKey {folder}/host\n"
        f"AuthorizedKeysFile {folder}/user.pub\n"
        "PidFile none\n"
        "StrictModes no\n"
        "UsePAM no\n"
        "UseDNS no\n"
        "PermitRootLogin yes\n"
        "PasswordAuthentication no\n"
        "MaxStartups 100\n"
    )


def setup(directory: Path, name: str, shared: list[Path]) -> Path:
    """The shell script by which a host gets its name and what is its own: /tmp, /dev/shm, /run, /sys, files in /etc.

    `shared` are the folders below /tmp that all hosts see all the same.
    """
    own = directory / name
    lines = [f"hostname {name}"]
    for path in shared:
        inside = own / "tmp" / path.relative_to("/tmp")
        lines += [f"mkdir -p {inside}", f"mount --rbind {path} {inside}"]
    # A new sysfs shows the host's own interfaces, but without the control groups, which slurmd wants.
    lines += [f"mount -t sysfs sysfs {own}/sys", f"mount --rbind /sys/fs/cgroup {own}/sys/fs/cgroup"]
    lines += [f"mount --move {own}/sys /sys", "mount -t tmpfs tmpfs /dev/shm"]
    lines += ["mount -t tmpfs -o mode=755 tmpfs /run", "mkdir -m 755 /run/sshd"]
    lines += [f"mount --bind {own}/hosts /etc/hosts", f"mount --bind {directory}/ssh/config /etc/ssh/ssh_config"]
    lines += [f"! [ -e /etc/resolv.conf ] || mount --bind {directory}/empty /etc/resolv.conf"]
    lines += [
        f"mount --bind {directory}/slurm /etc/slurm",
        f"! [ -d /root/.ssh ] || mount --bind {own}/root /root/.ssh",
    ]
    lines += [f"mount --rbind {own}/tmp /tmp"]
    (own / "setup").write_text("\n".join(lines))
    return own / "setup"
