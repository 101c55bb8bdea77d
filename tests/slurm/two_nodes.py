"""Jobs of the shipped template on a cluster that a whole test file shares."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import runs
from cluster.hosts import wait_until
from cluster.jobs import ENDED, Job
from cluster.slurm import Cluster

SLACK = 4  # seconds on top of what is promised: two busy cores, and the test looks at a job only now and then
MESSAGE = re.compile(r"hvd_ddp: rank (\d+) on (\S+) (failed|last seen) in (.+?) at step (\d+): (.+)")


@contextmanager
def cluster_for(tmp_path_factory: pytest.TempPathFactory, nodes: int = 2) -> Iterator[Cluster]:
    """A cluster of this size that sees the folders of all tests."""
    with Cluster.start(nodes, shared=[tmp_path_factory.getbasetemp()]) as cluster:
        yield cluster


def submit(cluster: Cluster, folder: Path, *train: str, tasks: int = 1, run_dir: str = "run", **env: str) -> Job:
    """train.sbatch in `folder` on two nodes with so many tasks each, and the options of `train`."""
    options = f"-N2 --ntasks-per-node={tasks}"
    return runs.submit(cluster, "train.sbatch", options, "--run-dir", run_dir, *train, cwd=folder, **env)


def ends(job: Job, timeout: float, *, lost_node: bool = False) -> str:
    """The state that it ends in; of a lost node Slurm waits for an answer when all is over."""
    states = ENDED | {"COMPLETING"} if lost_node else ENDED
    job.until(lambda: job.state in states, "end", timeout)
    return job.state


def nothing_left(cluster: Cluster, *names: str, within: float = 5) -> None:
    """On these nodes, by default on all; but for who waits there to requeue a job whose batch script is cut off."""
    nodes = [node for node in cluster.nodes if not names or node.name in names]

    def gone() -> bool:
        commands = [process.command for node in nodes for process in node.processes()]
        return all("bash -c watch node" in command or command == "sleep 60" for command in commands)

    wait_until(gone, "no process of a job is left", within)


def said(log: str, *, last: int = 12, several: bool = False) -> tuple[str, ...]:
    """(rank, host, failed or last seen, phase, step, words) of the one message, which is among the last lines.

    `several`: where ranks that can't hear each other may each say theirs, of the last one.
    """
    lines = log.splitlines()
    found = [MESSAGE.search(line) for line in lines if "hvd_ddp: rank" in line]
    assert len(found) == 1 or (found and several), log
    assert found[-1], log
    assert any("hvd_ddp: rank" in line for line in lines[-last:]), log
    return found[-1].groups()


def the_record(folder: Path) -> dict[str, Any]:
    """The only one in failures/."""
    [path] = (folder / "run/failures/0").glob("*.json")
    record: dict[str, Any] = json.loads(path.read_text())
    assert path.name == f"rank_{record['rank']:04d}.json"
    return record
