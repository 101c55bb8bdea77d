"""The files that daemons and hosts of the cluster read: keys, slurm.conf, ssh, /etc/hosts."""

import os
import subprocess
from pathlib import Path

# What a test may change with Cluster.configure(). KillWait is 30 and SlurmdTimeout 300 on most sites: here shorter, to
# be tested in little time. A requeued job may start when the credential of its first start has expired (cred_expire in
# AuthInfo, 120 by default), and its begin is looked at every sched_interval seconds.
DEFAULTS = {
    "KillWait": "10",
    "SlurmdTimeout": "60",
    "MessageTimeout": "5",
    "OverTimeLimit": "0",
    "ReturnToService": "2",
    "MinJobAge": "100000",
    "InactiveLimit": "0",
    "UnkillableStepTimeout": "60",
    "SchedulerParameters": "sched_interval=1,bf_interval=1,batch_sched_delay=1,sched_min_interval=100000",
}
REQUEUE_DELAY = 5


def slurm_conf(directory: Path, addresses: dict[str, str], cpus: int, changes: dict[str, str]) -> str:
    """slurm.conf for the hosts of `addresses`, the first of which is the head."""
    (head, head_address), *nodes = addresses.items()
    settings = {
        "ClusterName": "hvd",
        "SlurmctldHost": f"{head}({head_address})",
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={directory}/munge/socket,cred_expire={REQUEUE_DELAY}",
        "MpiDefault": "none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
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
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines += [f"NodeName={node} NodeAddr={address} CPUs={cpus} State=UNKNOWN" for node, address in nodes]
    lines += ["PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]
    return "\n".join(lines) + "\n"


def hosts(addresses: dict[str, str]) -> str:
    """/etc/hosts of every host."""
    return "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())


def write(directory: Path, addresses: dict[str, str]) -> None:
    """Folders, keys and what every host has in common, but for slurm.conf."""
    for name in ("munge", "slurm", "ssh"):
        (directory / name).mkdir()
    for name in addresses:
        for folder in ("tmp", "sys", "empty", "spool", "state"):
            (directory / name / folder).mkdir(parents=True)
        (directory / name / "hosts").write_text(hosts(addresses))
    key = directory / "munge/key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    ssh = directory / "ssh"
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(ssh / name)]
        subprocess.run(command, check=True, timeout=30)
    (ssh / "known_hosts").write_text(f"* {(ssh / 'host.pub').read_text()}")
    (ssh / "config").write_text(
        f"IdentityFile {ssh}/user\nGlobalKnownHostsFile {ssh}/known_hosts\nUserKnownHostsFile /dev/null\n"
        "StrictHostKeyChecking yes\nBatchMode yes\nLogLevel ERROR\n"
    )
    (ssh / "sshd").write_text(
        f"HostKey {ssh}/host\nAuthorizedKeysFile {ssh}/user.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 100\n"
    )


def setup(directory: Path, name: str, shared: list[Path]) -> str:
    """The shell lines by which a host gets its name and what is its own: /tmp, /dev/shm, /run, /sys, files in /etc.

    `shared` are the folders below /tmp that all hosts see all the same.
    """
    own = directory / name
    lines = [f"hostname {name}"]
    for path in shared:
        inside = own / "tmp" / path.relative_to("/tmp")
        lines += [f"mkdir -p {inside}", f"mount --rbind {path} {inside}"]
    lines += [f"mount -t sysfs sysfs {own}/sys", f"mount --rbind /sys/fs/cgroup {own}/sys/fs/cgroup"]
    lines += [f"mount --rbind {own}/sys /sys", "mount -t tmpfs tmpfs /dev/shm"]
    lines += ["mount -t tmpfs -o mode=755 tmpfs /run", "mkdir -m 755 /run/sshd"]
    lines += [f"mount --bind {own}/hosts /etc/hosts", f"mount --bind {directory}/ssh/config /etc/ssh/ssh_config"]
    lines += [
        f"mount --bind {directory}/slurm /etc/slurm",
        f"! [ -d /root/.ssh ] || mount --bind {own}/empty /root/.ssh",
    ]
    return "\n".join([*lines, f"mount --rbind {own}/tmp /tmp"])
