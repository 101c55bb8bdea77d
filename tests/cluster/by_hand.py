"""The cluster from a shell."""

import argparse
import os
from pathlib import Path

from launchers import environment

from .slurm import Cluster, clusters, sweep


def main() -> int:
    """The exit code; `sh` does not return."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster that stays until `down`")
    up.add_argument("--nodes", type=int, default=2, choices=range(1, 5))
    down = commands.add_parser("down", help="end what `up` started, and remove what dead clusters left")
    sh = commands.add_parser("sh", help="run a command, or a shell, on a node")
    sh.add_argument("--node", default="node1", help="default node1; the host of slurmctld is `head`")
    sh.add_argument("program", nargs="*")
    for command in (down, sh):
        command.add_argument(
            "--cluster", type=Path, help="the directory that `up` named; default all, the newest for sh"
        )
    options = parser.parse_args()
    sweep()
    if options.command == "up":
        cluster = Cluster.start(options.nodes, keep=True)
        print(f"{', '.join(cluster.hosts)} are up. State and logs: {cluster.directory}")
        return 0
    chosen = [
        cluster for cluster in clusters() if cluster.options["keep"] and options.cluster in (None, cluster.directory)
    ]
    if options.command == "down":
        for cluster in chosen:
            cluster.down()
        return 0
    if not chosen:
        parser.error("no cluster is up. Start one: python -m tests.cluster up")
    command = chosen[-1].node(options.node).space.command(options.program or ["bash"], Path.cwd())
    os.execvpe(command[0], command, environment())
