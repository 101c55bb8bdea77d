"""Who am I: the table of launchers, fed with environments that the real launchers left (tests/environments).

Each file there is one start: its command, what it was captured from (null: written by hand from the documentation that
it names), and the relevant variables of each process, in rank order.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import BIN, ROOT, command, environment, run

from hvd_ddp.backends import auto
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job import launch as launch_module
from hvd_ddp.job.launch import Launch, allocation, detect, export, is_speaker

FOLDER = Path(__file__).parent.parent / "environments"
FILES = sorted(path.stem for path in FOLDER.glob("*.json"))

# name: launcher, auto's backend, (local_rank, local_world_size) of each rank
NORMAL: dict[str, tuple[str, str, list[tuple[int, int | None]]]] = {
    "torchrun": ("torchrun", "ddp", [(0, 2), (1, 2)]),
    "torchrun-again": ("torchrun", "ddp", [(0, 2), (1, 2)]),
    "torchrun-2-nodes": ("torchrun", "ddp", [(0, 1), (0, 1)]),
    "nproc": ("torchrun", "ddp", [(0, 2), (1, 2)]),
    "ray": ("ray", "ddp", [(0, 2), (1, 2)]),
    "openmpi": ("openmpi", "ddp", [(0, 2), (1, 2)]),
    "openmpi-again": ("openmpi", "ddp", [(0, 2), (1, 2)]),
    "hydra": ("hydra", "ddp", [(0, 2), (1, 2)]),
    "horovodrun-gloo": ("horovodrun", "horovod", [(0, 2), (1, 2)]),
    "horovodrun-mpi": ("openmpi", "horovod", [(0, 2), (1, 2)]),
    "horovodrun-mpi-unmarked": ("openmpi", "horovod", [(0, 2), (1, 2)]),
    "srun": ("srun", "ddp", [(0, 2), (1, 2)]),
    "srun-pmi2": ("srun", "ddp", [(0, 2), (1, 2)]),
    "srun-pmix": ("srun", "ddp", [(0, 2), (1, 2)]),
    "srun-2-1": ("srun", "ddp", [(0, 2), (1, 2), (0, 1)]),
    "srun-cyclic": ("srun", "ddp", [(0, 3), (0, 1), (1, 3), (2, 3)]),
    "srun-cyclic-block": ("srun", "ddp", [(0, 3), (0, 1), (1, 3), (2, 3)]),
    "srun-plane": ("srun", "ddp", [(0, 2), (0, 2), (1, 2), (1, 2)]),
    "srun-second-node": ("srun", "local", [(0, 1)]),
    "srun-step-1": ("srun", "ddp", [(0, 2), (1, 2), (0, 1)]),
    "sbatch-srun": ("srun", "ddp", [(0, 2), (1, 2)]),
    "sbatch-shell-1": ("single", "local", [(0, 1)]),
    "salloc": ("single", "local", [(0, 1)]),
    # a launcher inside another: the inner one counts
    "sbatch-torchrun": ("torchrun", "ddp", [(0, 2), (1, 2)]),
    "srun-1-torchrun": ("torchrun", "ddp", [(0, 2), (1, 2)]),
    "srun-2-torchrun-one-world": ("torchrun", "ddp", [(0, 1), (0, 1)]),
    "salloc-openmpi": ("openmpi", "ddp", [(0, 2), (1, 2)]),
    "sbatch-openmpi": ("openmpi", "ddp", [(0, 2), (1, 2)]),
    "sbatch-openmpi-2-nodes": ("openmpi", "ddp", [(0, 2), (1, 2), (0, 2), (1, 2)]),
    "sbatch-hydra": ("hydra", "ddp", [(0, 2), (1, 2)]),
    "sbatch-hydra-2-nodes": ("hydra", "ddp", [(0, 2), (1, 2), (0, 2), (1, 2)]),
    # written by hand
    "pals": ("pals", "ddp", [(0, 2), (1, 2), (0, 2), (1, 2)]),
    "jsrun": ("jsrun", "ddp", [(0, 2), (1, 2), (0, 2), (1, 2)]),
    "jsrun-spectrum": ("openmpi", "ddp", [(0, 2), (1, 2), (0, 2), (1, 2)]),  # the row above; the same ranks
    "jsrun-spectrum-1-node": ("openmpi", "ddp", [(0, 2), (1, 2)]),
    "flux": ("flux", "ddp", [(0, None), (1, None), (0, None), (1, None)]),
}
REFUSED = {
    "sbatch-shell": ["SLURM_NTASKS is `2`", "srun python -m hvd_ddp"],
    "sbatch-shell-tasks-per-node": ["SLURM_NTASKS is `2`", "srun python -m hvd_ddp"],
    "sbatch-shell-2-nodes": ["SLURM_JOB_NUM_NODES is `2`", "srun python -m hvd_ddp"],
    "srun-2-torchrun": ["srun started `2` tasks", "torchrun", "--nnodes 2"],
    "srun-2-hydra": ["srun started `2` tasks", "hydra"],
    "openmpi-torchrun": ["openmpi started `2` tasks", "torchrun", "--nnodes 2"],
    "pals-pmix": ["PALS_", "each would train alone"],
}
BY_HAND = {"pals", "pals-pmix", "jsrun", "jsrun-spectrum", "jsrun-spectrum-1-node", "flux"}


def load(name: str) -> list[dict[str, str]]:
    ranks: list[dict[str, str]] = json.loads((FOLDER / f"{name}.json").read_text())["ranks"]
    return ranks


def one(name: str, rank: int = 0, **changed: str | None) -> dict[str, str]:
    """One rank's environment, with some variables set (or, None, removed)."""
    env = load(name)[rank] | changed
    return {key: value for key, value in env.items() if value is not None}


def refused(env: dict[str, str]) -> str:
    with pytest.raises(HvdDDPError) as caught:
        detect(env)
    text = str(caught.value)
    assert "\n" not in text
    assert text.count(". ") >= 1, f"fact, consequence, remedy: {text}"
    return text


# The files


def test_every_file_is_used() -> None:
    assert set(FILES) == set(NORMAL) | set(REFUSED)


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_where_it_is_from_and_nothing_of_the_machine(name: str) -> None:
    content = json.loads((FOLDER / f"{name}.json").read_text())
    assert content["command"]
    assert (content["captured_from"] is None) == (name in BY_HAND)
    assert bool(content.get("documented")) == (name in BY_HAND)
    text = json.dumps(content["ranks"])
    for leak in (
        "/root",
        "/home",
        "/tmp",
        "site-packages",
        "TOKEN",
        "KEY",
        "PASS",
        "SECRET",
        socket.gethostname() + '"',
    ):
        assert leak not in text, leak


# Normal starts


@pytest.mark.parametrize("name", NORMAL)
def test_place_in_the_job(name: str) -> None:
    launcher, _, places = NORMAL[name]
    ranks = load(name)
    assert len(ranks) == len(places)
    for rank, (env, (local_rank, local_world_size)) in enumerate(zip(ranks, places, strict=True)):
        launch = detect(env)
        assert (launch.launcher, launch.rank, launch.world_size) == (launcher, rank, len(ranks))
        assert (launch.local_rank, launch.local_world_size) == (local_rank, local_world_size)


@pytest.mark.parametrize("name", NORMAL)
def test_the_job_is_the_same_on_all_its_ranks(name: str) -> None:
    assert len({detect(env).job for env in load(name)}) == 1


def test_jobs_differ() -> None:
    jobs = {name: detect(load(name)[0]).job for name in NORMAL if NORMAL[name][0] not in ("single", "hydra")}
    same = [(a, b) for a in jobs for b in jobs if a < b and jobs[a] == jobs[b] and "horovodrun-gloo" not in (a, b)]
    # jsrun's three files are one start, written three ways; srun's were captured from jobs of two Slurms with the same
    # numbers, so that only those of one Slurm count.
    assert [pair for pair in same if not pair[0].startswith(("jsrun", "srun", "sbatch"))] == []
    assert detect(one("srun")).job != detect(one("srun", SLURM_STEP_ID="1")).job
    assert detect(one("srun")).job != detect(one("srun", SLURM_JOB_ID="99")).job
    assert detect(one("srun")).job != detect(one("srun", SLURM_RESTART_COUNT="1")).job
    assert detect(one("torchrun")).job != detect(one("torchrun", TORCHELASTIC_RESTART_COUNT="1")).job


@pytest.mark.parametrize("name", NORMAL)
def test_auto_backend(name: str) -> None:
    launcher, backend, _ = NORMAL[name]
    for env in load(name):
        launch = detect(env)
        assert launch.by_horovodrun == name.startswith("horovodrun")
        assert auto(launch)[0] == backend
        assert {"horovod": "horovodrun", "ddp": launcher, "local": "one process"}[backend] in auto(launch)[1]


def test_what_horovodrun_left_is_in_the_banner() -> None:
    assert "horovodrun's mark" in detect(one("horovodrun-mpi")).seen
    assert "horovodrun's mark" in detect(one("horovodrun-mpi-unmarked")).seen
    assert "horovodrun" not in detect(one("openmpi")).seen
    assert "HVD_DDP_LAUNCHER" in one("horovodrun-mpi")
    assert "HVD_DDP_LAUNCHER" not in one("horovodrun-mpi-unmarked"), "else it tests nothing"


def test_the_inner_launcher_counts_also_inside_horovodrun() -> None:
    """torchrun in the one task of a horovodrun, which left its mark and its name in `_`."""
    marks = {"HVD_DDP_LAUNCHER": "horovodrun", "_": "/opt/env/bin/horovodrun"}
    assert auto(detect(one("torchrun", **marks)))[0] == "ddp"
    assert auto(detect(one("srun", **marks)))[0] == "ddp"
    assert auto(detect(one("hydra", **marks)))[0] == "horovod"


def test_ray_that_srun_started_is_one_job() -> None:
    """A daemon a node, each of which hands the variables of its task to the ranks on it."""
    for node, daemon in enumerate(load("srun-2-1")[1:]):
        for rank in range(2):
            launch = detect({**daemon, **one("ray", rank)})
            assert (launch.launcher, launch.rank, launch.world_size) == ("ray", rank, 2), node
            assert launch.ray_folder == f"/scratch/hvd_ddp-{rank}"


def test_the_mark_alone_is_no_launcher() -> None:
    """An exported mark, or a shell that horovodrun started, on a process without ranks."""
    assert auto(detect({"HVD_DDP_LAUNCHER": "horovodrun", "_": "/opt/env/bin/horovodrun"}))[0] == "local"


def test_no_environment_at_all_is_one_process() -> None:
    launch = detect({})
    assert (launch.launcher, launch.rank, launch.world_size, launch.local_rank) == ("single", 0, 1, 0)
    assert launch.scheduler is None
    assert launch == Launch(cores=os.cpu_count() or 1)


def test_stores_of_launchers() -> None:
    env = one("torchrun")
    assert detect(env).torchrun_store == ("localhost", int(env["MASTER_PORT"]), True)
    assert detect(env).horovodrun_store is None
    env = one("horovodrun-gloo", 1)
    assert detect(env).horovodrun_store == ("127.0.0.1", int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    assert detect(one("openmpi")).torchrun_store is None


@pytest.mark.parametrize(
    ("name", "mpi"),
    [("openmpi", "Open MPI"), ("hydra", "MPICH"), ("horovodrun-mpi", "Open MPI"), ("srun", None), ("torchrun", None),
     ("horovodrun-gloo", None), ("sbatch-hydra", "MPICH"), ("jsrun", "Spectrum MPI"), ("pals", "MPICH")],
)  # fmt: skip
def test_whose_mpi(name: str, mpi: str | None) -> None:
    assert detect(one(name)).mpi == mpi


# Schedulers


def test_scheduler_is_not_launcher() -> None:
    launch = detect(one("sbatch-torchrun"))
    assert (launch.launcher, launch.scheduler, launch.scheduler_job) == ("torchrun", "slurm", "11")
    launch = detect(one("salloc"))
    assert (launch.launcher, launch.scheduler, launch.scheduler_job) == ("single", "slurm", "12")
    assert detect(one("pals")).scheduler == "pbs"
    assert detect(one("jsrun")).scheduler == "lsf"
    assert detect(one("flux")).scheduler == "flux"
    assert detect(one("torchrun")).scheduler is None


def test_restarts_and_cores() -> None:
    assert detect(one("srun")).scheduler_restart == 0
    assert detect(one("srun", SLURM_RESTART_COUNT="3")).scheduler_restart == 3
    assert [detect(env).cores for env in load("srun-2-1")] == [2, 2, 1]  # what the job has of each node
    assert detect(one("pals")).cores == 64
    assert detect(one("salloc")).cores == os.cpu_count()


# Inside an allocation without a launcher


@pytest.mark.parametrize(
    ("nodes", "tasks", "seen"),
    [("1", "2", " of 2 tasks: only this process trains; start with srun to use them"),
     ("2", "2", " of 2 nodes: only this process trains; start with srun to use them"),
     ("16", None, " of 16 nodes: only this process trains; start with srun to use them"),
     ("1", "1", ""), ("1", None, ""), ("some", "²", "")],
)  # fmt: skip
def test_salloc_without_srun_says_what_lies_idle(nodes: str, tasks: str | None, seen: str) -> None:
    launch = detect(one("salloc", SLURM_JOB_NUM_NODES=nodes, SLURM_NTASKS=tasks))
    assert launch.seen == "no launcher, inside slurm job 12" + seen
    assert launch.launcher == "single"


def test_no_launcher_elsewhere() -> None:
    assert detect(load("salloc")[0]).seen.endswith("of 2 tasks: only this process trains; start with srun to use them")
    assert detect(load("sbatch-shell-1")[0]).seen == "no launcher, inside slurm job 9"
    assert detect({}).seen == "no launcher"
    assert detect({"PBS_JOBID": "1.server"}).seen == "no launcher, inside pbs job 1.server"
    assert "no launcher" not in detect(one("sbatch-torchrun")).seen


BATCH_SHELLS = [name for name in FILES if name.startswith("sbatch-shell")]


@pytest.mark.parametrize("name", BATCH_SHELLS)
def test_what_trains_nothing_may_run_in_a_batch_shell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--print-config` there learns the run directory and has bad options refused, before srun starts the ranks."""
    (env,) = load(name)
    launch = allocation(env)
    assert (launch.scheduler, launch.scheduler_job) == ("slurm", env["SLURM_JOB_ID"])
    assert (launch.launcher, launch.rank, launch.world_size) == ("single", 0, 1)
    monkeypatch.setattr(os, "environ", env)
    assert is_speaker()
    assert allocation() == launch


def test_the_allocation_is_the_same_seen_from_a_rank() -> None:
    """So that a run directory learnt in the batch shell is that of the ranks."""
    for name in ("srun", "sbatch-srun", "sbatch-torchrun", "pals", "jsrun", "flux", "horovodrun-gloo"):
        for env in load(name):
            seen, launch = allocation(env), detect(env)
            for field in ("scheduler", "scheduler_job", "scheduler_restart", "ends_at", "cores"):
                assert getattr(seen, field) == getattr(launch, field), (name, field)


# Interfaces that the user names


def test_interfaces() -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
    assert detect(one("srun")).interfaces is None
    for position, name in enumerate(names):
        assert detect(one("srun", **dict.fromkeys(names[position:], "^lo,docker"))).interfaces == (name, "^lo,docker")
    assert detect(one("srun", GLOO_SOCKET_IFNAME="", NCCL_SOCKET_IFNAME="=ib0")).interfaces == (names[1], "=ib0")
    assert detect({"NCCL_SOCKET_IFNAME": "=ib0"}).interfaces == (names[1], "=ib0")
    assert one("horovodrun-gloo")["HOROVOD_GLOO_IFACE"] == "lo", "else it tests nothing"
    assert detect(one("horovodrun-gloo")).interfaces is None
    assert detect(one("horovodrun-gloo", HOROVOD_GLOO_IFACE="eth0")).interfaces == (names[2], "eth0")


def test_interfaces_that_a_backend_exports_are_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for env in ({}, {"NCCL_SOCKET_IFNAME": "^docker"}):
        monkeypatch.setattr(os, "environ", dict(env))
        monkeypatch.setattr(launch_module, "_before", {})
        first = detect().interfaces
        export({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"})
        assert detect().interfaces == first == (("NCCL_SOCKET_IFNAME", "^docker") if env else None)


# Slurm's task lists and node lists


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2,1", [2, 1]), ("2(x3),1", [2, 2, 2, 1]), ("1(x2)", [1, 1]), ("4", [4]), ("2(x2),1(x3),8", [2, 2, 1, 1, 1, 8]),
     ("", []), ("some", []), ("2(x", []), ("2(y3)", []), ("-1", []), ("2,,1", []), ("2,1,", [])],
)  # fmt: skip
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    launches = [
        detect(one("srun", SLURM_STEP_TASKS_PER_NODE=text, SLURM_NODEID=str(node))) for node in range(len(counts) + 1)
    ]
    assert [launch.local_world_size for launch in launches] == [*counts, None]


def test_hosts_from_node_lists() -> None:
    assert {detect(env).hosts for env in load("srun-2-1")} == {("node1", "node1", "node2")}
    changed = {"SLURM_STEP_NODELIST": "gpu[007-009,012],login", "SLURM_STEP_TASKS_PER_NODE": "2,1(x3),2"}
    hosts = detect(one("srun", SLURM_STEP_NUM_TASKS="7", SLURM_NTASKS="7", **changed)).hosts
    assert hosts == ("gpu007", "gpu007", "gpu008", "gpu009", "gpu012", "login", "login")
    for size in ("6", "8", "9" * 30):  # not one host a rank: nobody knows which
        assert detect(one("srun", SLURM_STEP_NUM_TASKS=size, **changed)).hosts is None
    changed["SLURM_STEP_NODELIST"] = "gpu[007-009],login"  # nor one count a node
    assert detect(one("srun", SLURM_STEP_NUM_TASKS="7", **changed)).hosts is None


def test_hosts_by_the_distribution_of_the_step() -> None:
    for name, known in (("srun-cyclic", True), ("srun-cyclic-block", True), ("srun-plane", False)):
        ranks = load(name)
        truth = tuple(env["SLURMD_NODENAME"] for env in ranks)
        assert truth[:2] == ("node1", "node2"), "else it tests nothing"
        assert {detect(env).hosts for env in ranks} == {truth if known else None}, name


@pytest.mark.parametrize(
    ("distribution", "hosts"),
    [("block", "aabbbc"), ("block:cyclic", "aabbbc"), ("block:block:fcyclic", "aabbbc"), ("block,Pack", "aabbbc"),
     ("cyclic", "abcabb"), ("cyclic:cyclic", "abcabb"), ("cyclic:fcyclic:block", "abcabb"), (None, "aabbbc"),
     ("plane", None), ("arbitrary", None), ("unknown", None), ("blocks", None), ("", None)],
)  # fmt: skip
def test_distributions(distribution: str | None, hosts: str | None) -> None:
    """A full node is passed over; the words after the first one are of sockets and cores."""
    step = {"SLURM_STEP_NODELIST": "a,b,c", "SLURM_STEP_TASKS_PER_NODE": "2,3,1", "SLURM_STEP_NUM_TASKS": "6"}
    env = one("srun", SLURM_DISTRIBUTION=distribution, SLURM_NTASKS="6", **step)
    assert detect(env).hosts == (tuple(hosts) if hosts else None)


@pytest.mark.parametrize("name", ["srun-2-1", "srun-step-1", "srun-cyclic", "srun-plane"])
def test_node_rank(name: str) -> None:
    for env in load(name):
        assert detect(env).node_rank == int(env["SLURMD_NODENAME"].removeprefix("node")) - 1


# What is refused


@pytest.mark.parametrize("name", REFUSED)
def test_refused_starts(name: str) -> None:
    """On every rank: one that went on would wait for the others until the start times out."""
    for env in load(name):
        text = refused(env)
        for word in REFUSED[name]:
            assert word in text, text


NO_TORCHRUN = [name for name in NORMAL if "RANK" not in load(name)[0]]


@pytest.mark.parametrize("name", NO_TORCHRUN)
def test_rank_and_world_size_that_the_user_exported(name: str) -> None:
    ranks = load(name)
    size, last = len(ranks), len(ranks) - 1
    for variable, value in (("RANK", str(size)), ("WORLD_SIZE", str(size + 1)), ("RANK", "zero")):
        text = refused(one(name, **{variable: value}))
        assert f"{variable} is `{value}`" in text
        assert "Unset RANK and WORLD_SIZE" in text
    # what agrees does no harm, and an empty one is none
    assert detect(one(name, last, RANK=str(last), WORLD_SIZE=str(size))).rank == last
    assert detect(one(name, RANK="", WORLD_SIZE="")).world_size == size


def test_rank_0_for_all_is_said_by_a_rank_that_sees_it() -> None:
    """RANK=0 is right on rank 0, which would speak for all."""
    assert detect(one("openmpi", 0, RANK="0")).rank == 0
    with pytest.raises(HvdDDPError, match="RANK is `0`") as caught:
        detect(one("openmpi", 1, RANK="0"))
    assert not caught.value.everywhere
    with pytest.raises(HvdDDPError, match="WORLD_SIZE is `9`") as caught:
        detect(one("openmpi", 1, WORLD_SIZE="9"))
    assert caught.value.everywhere


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("7", "2"), ("-1", "2"), ("0", "0")])
@pytest.mark.parametrize("name", ["openmpi", "hydra", "horovodrun-gloo", "srun"])
def test_a_rank_outside_the_size(name: str, rank: str, size: str) -> None:
    row = next(row for row in launch_module.LAUNCHERS if row.name == NORMAL[name][0])
    text = refused(one(name, **{row.rank: rank, row.world_size: size}))
    assert f"{row.rank} is `{rank}`" in text
    assert f"{row.world_size} is `{size}`" in text


def test_torchrun_ranks_are_not_foreign_but_must_fit() -> None:
    text = refused(one("torchrun", RANK="2"))
    assert "RANK is `2` and WORLD_SIZE is `2`" in text


@pytest.mark.parametrize("value", ["one", "1.0", "0x1", "1 2", "1e3"])
@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                      "OMPI_COMM_WORLD_LOCAL_SIZE"])  # fmt: skip
def test_not_a_number(variable: str, value: str) -> None:
    assert f"{variable} is `{value}`" in refused(one("openmpi", **{variable: value}))


def test_no_number_of_slurm_leads_to_a_traceback() -> None:
    names = [name for name in one("srun") if name.startswith("SLURM_")]
    for name in names:
        for value in ("garbage", "-1", "9" * 30, "1.5", "²"):
            try:
                detect(one("srun", **{name: value}))
            except HvdDDPError as error:
                assert name in str(error)


@pytest.mark.parametrize("name", [name for name in NORMAL if NORMAL[name][0] not in ("single",)])
def test_half_a_row_is_no_row(name: str) -> None:
    """Each required variable removed in turn: never this launcher's rank with another's size."""
    row = next(row for row in launch_module.LAUNCHERS if row.name == NORMAL[name][0])
    for missing in row.required:
        for env in load(name):
            env = {key: value for key, value in env.items() if key != missing}
            try:
                launch = detect(env)
            except HvdDDPError:
                continue
            assert launch.launcher != row.name
            if launch.launcher != "single":
                other = next(row for row in launch_module.LAUNCHERS if row.name == launch.launcher)
                assert launch.rank == int(env[other.rank])
                assert launch.world_size == int(env[other.world_size])


def test_half_a_row_falls_through_to_the_next() -> None:
    assert detect(one("sbatch-hydra", 1, MPI_LOCALRANKID=None)).launcher == "srun"
    assert detect(one("srun-pmi2", 1)).launcher == "srun"  # PMI_RANK and PMI_SIZE are not all of Hydra's row
    assert detect(one("flux", 1)).launcher == "flux"


@pytest.mark.parametrize(
    "env",
    [{"PMI_RANK": "0", "PMI_SIZE": "4"}, {"PMI_RANK": "1"}, {"OMPI_COMM_WORLD_RANK": "2"}, {"PMIX_RANK": "1"},
     {"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "2"}, {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}],
)  # fmt: skip
def test_several_ranks_of_which_none_knows_the_job(env: dict[str, str]) -> None:
    """Better refused than as many trainings over each other."""
    assert "each would train alone" in refused(env)


@pytest.mark.parametrize("env", [{"PMI_RANK": "0", "PMI_SIZE": "1"}, {"PMIX_RANK": "0"}, {"OMPI_MCA_btl": "self"}])
def test_one_rank_of_which_nothing_else_is_known_trains(env: dict[str, str]) -> None:
    assert detect(env).launcher == "single"


def test_rank_without_torchrun_is_refused() -> None:
    """RANK and WORLD_SIZE of a launcher that left no run id, so that torchrun's row does not apply."""
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    assert "RANK is `1`" in refused(env)
    assert "WORLD_SIZE is `2`" in refused(env | {"RANK": "0"})
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}).launcher == "single"


# Who says what all have found


@pytest.mark.parametrize("name", NORMAL)
def test_exactly_one_rank_speaks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speakers = []
    for rank, env in enumerate(load(name)):
        monkeypatch.setattr(os, "environ", env)
        speakers += [rank] if is_speaker() else []
    assert speakers == [0]


@pytest.mark.parametrize(
    "changed",
    [{"OMPI_COMM_WORLD_RANK": "5"}, {"OMPI_COMM_WORLD_RANK": "one"}, {"OMPI_COMM_WORLD_SIZE": "none"}],
)
def test_a_rank_that_is_out_of_place_speaks(changed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No other rank would."""
    monkeypatch.setattr(os, "environ", one("openmpi", 1, **changed))
    assert is_speaker()


# What a backend exports is no launcher


def test_a_second_look_sees_what_the_first_one_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod over Gloo wants HOROVOD_RANK and more in the environment; under mpirun that is not horovodrun."""
    for env in (one("openmpi", 1), one("srun", 1), one("horovodrun-gloo", 1), {}):
        monkeypatch.setattr(os, "environ", dict(env))
        monkeypatch.setattr(launch_module, "_before", {})
        first = detect()
        ours = one("horovodrun-gloo", 0, HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.9", HOROVOD_GLOO_RENDEZVOUS_PORT="9")
        export(ours)
        assert os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.9"
        assert detect() == first
        export({"HOROVOD_SIZE": "77"})
        assert detect() == first


# The real launchers that are here

SAY = (
    "import json, os; from pathlib import Path; from hvd_ddp.job.launch import detect; d = detect(); "
    '(Path(os.environ["SAID"]) / str(os.getpid())).write_text(json.dumps([d.launcher, d.rank, d.job]))'
)


def started(line: list[str], folder: Path) -> list[tuple[str, int, str]]:
    """What each rank that this line starts says of itself; by files, since launchers mix what ranks print."""
    said = folder / "said"
    shutil.rmtree(said, ignore_errors=True)
    said.mkdir()
    result = run(line, timeout=60, SAID=str(said))
    assert result.code == 0, result.text
    return sorted((launcher, rank, job) for launcher, rank, job in (json.loads(f.read_text()) for f in said.iterdir()))


@pytest.mark.parametrize(
    ("launcher", "name"), [("mpirun", "openmpi"), ("mpiexec.mpich", "hydra"), ("horovodrun --gloo", "horovodrun")]
)
def test_two_real_jobs(launcher: str, name: str, tmp_path: Path) -> None:
    jobs = []
    for _ in range(2):
        ranks = started(command(launcher, 2, ["-c", SAY]), tmp_path)
        assert [(launcher, rank) for launcher, rank, _ in ranks] == [(name, 0), (name, 1)]
        assert len({job for _, _, job in ranks}) == 1, ranks
        jobs.append(ranks[0][2])
    assert jobs[0] != jobs[1]
    if name == "hydra":  # by a port of its mpiexec, which is the same on all nodes
        assert all(re.fullmatch(r"hydra-\S+:\d+", job) for job in jobs), jobs


@pytest.mark.parametrize("inside", ["", "mpiexec.mpich -n 1 "])
def test_a_script_between_launcher_and_rank(inside: str, tmp_path: Path) -> None:
    """Hydra gives the job no name; a shell of each rank's own must not lead to a name of each rank's own."""
    assert shutil.which("mpiexec.mpich"), "apt-get install mpich"
    script = tmp_path / "rank.sh"
    script.write_text(f"#!/bin/bash\nulimit -c 0\n{sys.executable} -c '{SAY}'\ntrue\n")
    script.chmod(0o755)
    outer = tmp_path / "job.sh"
    outer.write_text(f"#!/bin/bash\nmpiexec.mpich -n 2 {script}\ntrue\n")
    outer.chmod(0o755)
    ranks = started([*inside.split(), str(outer)], tmp_path)
    assert [rank for _, rank, _ in ranks] == [0, 1]
    assert len({job for _, _, job in ranks}) == 1, ranks


def test_two_jobs_at_the_same_time(tmp_path: Path) -> None:
    """Both from one shell, so that what they have in common is as much as can be."""
    outer = tmp_path / "both.sh"
    inner = f"mpiexec.mpich -n 2 {sys.executable} -c '{SAY}'"
    outer.write_text(f"#!/bin/bash\n{inner} &\n{inner} &\nwait\n")
    outer.chmod(0o755)
    ranks = started([str(outer)], tmp_path)
    assert [rank for _, rank, _ in ranks] in ([0, 1, 0, 1], [0, 0, 1, 1])
    jobs = [job for _, _, job in ranks]
    assert sorted(jobs.count(job) for job in set(jobs)) == [2, 2], ranks


def test_torchrun_starts_what_was_captured(tmp_path: Path) -> None:
    """The captured variables are those that this torch sets: else the files want capturing again."""
    program = tmp_path / "say.py"
    program.write_text(
        "import json, os\nfrom hvd_ddp.job.launch import detect\n"
        "print('ENV', json.dumps(sorted(os.environ)))\nprint(detect().launcher, detect().rank)\n"
    )
    line = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "1", str(program)]
    result = subprocess.run(line, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    names = set(json.loads(next(text[4:] for text in result.stdout.splitlines() if text.startswith("ENV "))))
    captured = set(load("torchrun")[0]) - {"_"}
    assert captured <= names, captured - names
    assert "torchrun 0" in result.stdout
