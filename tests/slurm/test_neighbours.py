"""On two hosts under Slurm: other jobs and other programs on the same nodes do a job no harm."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from cluster.hosts import wait_until
from cluster.jobs import Job
from cluster.slurm import Cluster
from launchers import ROOT, command, run
from two_nodes import cluster_for, ends, nothing_left, submit

STRANGER = ROOT / "tests/slurm/stranger.py"
LATE = 15  # seconds by which one rank comes late, so that a stranger can come before it
TRAIN = ["--threads", "1", "--model", "factories:Small", "--max-steps", "12"]
# Listens on every port that is named, and says so. A port that is taken already is as good.
LISTEN = """
import socket, sys, time
held = []
for port in map(int, sys.argv[1:]):
    try:
        held.append(socket.create_server(("", port)))
    except OSError:
        pass
print("holds", len(held), flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, torch.Tensor]]:
    """For two seeds the weights after twelve steps, of two ranks on a host where nothing else runs."""
    found = {}
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp(f"seed{seed}")
        program = ["-m", "hvd_ddp", "train", "--run-dir", "run", *TRAIN, "--seed", str(seed)]
        result = run(command("--nproc", 2, program), cwd=folder, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
        assert result.code == 0, result.text
        found[seed] = weights(folder / "run")
    return found


def weights(run: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = torch.load(run / "checkpoints/step_00000012.pt", weights_only=True)["model"]
    return model


def differ(mine: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert mine.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(mine[name], wanted[name])]


@pytest.mark.parametrize(
    "backends", [("ddp", "horovod"), *[pytest.param((b, b), marks=pytest.mark.full) for b in ("ddp", "horovod")]]
)
def test_two_jobs_at_once(
    two: Cluster, backends: tuple[str, str], alone: dict[int, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """In one folder, on the same nodes."""
    jobs = [
        submit(two, tmp_path, "--backend", backend, *TRAIN, "--seed", str(seed), run_dir=f"run{seed}")
        for seed, backend in enumerate(backends, 1)
    ]
    for job in jobs:
        job.wait_state("RUNNING", 20)
    assert [job.state for job in jobs] == ["RUNNING", "RUNNING"]  # each takes seconds to start
    for seed, job in enumerate(jobs, 1):
        assert ends(job, 90) == "COMPLETED", job.log
        assert differ(weights(tmp_path / f"run{seed}"), alone[seed]) == []
    assert differ(alone[1], alone[2])


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=pytest.mark.full)])
def test_ports_that_others_hold(
    backend: str,
    alone: dict[int, dict[str, torch.Tensor]],
    tmp_path_factory: pytest.TempPathFactory,
    tmp_path: Path,
) -> None:
    """Nothing here has a first choice of a port: the kernel gives one that is free, of a range that is nearly full."""
    usual = [*range(29400, 29410), *range(29500, 29510), 12345, 23456]
    taken = list(range(40000, 40300))
    with cluster_for(tmp_path_factory) as cluster:
        for node in cluster.nodes:
            node.call("sh", "-c", "echo 40000 40399 >/proc/sys/net/ipv4/ip_local_port_range")
        command = [sys.executable, "-c", LISTEN, *map(str, usual + taken)]
        with cluster.program(*command, host="node1") as one, cluster.program(*command, host="node2") as other:
            wait_until(lambda: "holds" in one.result.out and "holds" in other.result.out, "both listen")
            assert int(one.result.out.split()[1]) > 300
            job = submit(cluster, tmp_path, "--backend", backend, *TRAIN, "--seed", "1")
            assert ends(job, 90) == "COMPLETED", job.log
    assert differ(weights(tmp_path / "run"), alone[1]) == []


def test_strangers_are_turned_away(two: Cluster, alone: dict[int, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """While rank 0 waits for rank 1: programs that know its address, and another job that was given it."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    job = late(two, first, 1, LATE)
    job.until(lambda: list(first.glob("run/.rendezvous-*")), "put down its card", 30)
    [path] = first.glob("run/.rendezvous-*")
    card = json.loads(path.read_text())

    # Of the second job only rank 1 comes; what it finds is the first one's address.
    other = late(two, second, 0, 1000, "--start-timeout", "8")
    forged = second / "run" / path.name.replace(f"-{job.id}", f"-{other.id}")
    assert forged.name != path.name
    forged.parent.mkdir()
    forged.write_text(json.dumps(card | {"token": "00" * 32}))
    other.wait_state("RUNNING", 5)

    result = two.run(sys.executable, str(STRANGER), str(path), host="node2", timeout=60, cwd=first)
    assert result.code == 0, result.text
    tries = result.out.splitlines()
    assert len(tries) == 4
    assert [line for line in tries if not line.endswith(": turned away")] == []
    assert path.exists(), "else it was no longer listening"

    assert ends(job, 60) == "COMPLETED", job.log
    assert differ(weights(first / "run"), alone[1]) == []
    assert ends(other, 60) == "FAILED", other.log
    assert "Rank 0 (node1) was not found" in other.log
    assert not (second / "run/config.yaml").exists()
    nothing_left(two)


def late(two: Cluster, folder: Path, rank: int, seconds: int, *options: str) -> Job:
    """A job of two ranks, one of which comes so much later."""
    program = shlex.join(
        [sys.executable, "-m", "hvd_ddp", "train", "--run-dir", "run", *TRAIN, "--seed", "1", *options]
    )
    tasks = f"[[ $SLURM_PROCID == {rank} ]] && sleep {seconds}; exec {program}"
    script = f"srun --kill-on-bad-exit=1 bash -c '{tasks}'"
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    return two.sbatch(script, "-N2", "--ntasks-per-node=1", cwd=folder, **paths)
