"""The cluster from a shell."""

import argparse
import os

from launchers import environment

from .slurm import Cluster, clusters, sweep


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster that stays until `down`")
    up.add_argument("--nodes", type=int, default=2, choices=range(1, 5))
    commands.add_parser("down", help="end the clusters that `up` started, and what is left of dead ones")
    sh = commands.add_parser("sh", help="run a command, or a shell, on a host")
    sh.add_argument("--node", default="node1", help="node1 unless told otherwise; the controller's host is `head`")
    sh.add_argument("program", nargs="*")
    options = parser.parse_args()
    sweep()
    kept = [cluster for cluster in clusters() if cluster.options["keep"]]
    if options.command == "up":
        cluster = Cluster.start(options.nodes, keep=True)
        print(f"{', '.join(cluster.hosts)} are up; state and logs are in {cluster.directory}")
    elif options.command == "down":
        for cluster in kept:
            cluster.down()
    elif not kept:
        parser.error("no cluster is up. Start one: python -m tests.cluster up")
    else:
        command = kept[-1].node(options.node).space.command(options.program or ["bash"], os.getcwd())
        os.execvpe(command[0], command, environment())
    return 0
