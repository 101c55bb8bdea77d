"""Who am I: the table of launchers. The only place that reads or writes os.environ."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.scheduler import Scheduler, facts, find, step_hosts, tasks_per_node, unused

HOROVODRUN_MARK = "HVD_DDP_LAUNCHER"  # exported to the ranks by the horovodrun that install-horovod builds


@dataclass(frozen=True)
class Launcher:
    """One row: the variables that hold each fact. It applies only if all of `required` are there and not empty."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str | None = None
    node_rank: str | None = None
    job: str | None = None
    also: str | None = None  # a variable that only this launcher sets
    mpi: str | None = None  # how the library of this launcher's MPI names itself
    same: tuple[str, ...] = ()  # rows above it that may describe the very ranks that this launcher started

    @property
    def required(self) -> list[str]:
        """Names of the variables without which the row says nothing."""
        optional = (self.local_world_size, self.node_rank, self.also)
        return [self.rank, self.world_size, self.local_rank, *(name for name in optional if name)]


# Most specific first. Rank and size never come from two rows: a row applies whole or not at all.
# torchrun: docs.pytorch.org/docs/stable/elastic/run.html. Open MPI: docs.open-mpi.org, "Environment variables set for
# MPI applications" (its NODE_RANK is a rank on the node). Ray numbers no ranks: job/ray_ranks.py does. PALS, jsrun,
# Flux: from their documentation, not run here.
LAUNCHERS: tuple[Launcher, ...] = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
             job="TORCHELASTIC_RUN_ID", also="TORCHELASTIC_RUN_ID"),
    Launcher("ray", "HVD_DDP_RAY_RANK", "HVD_DDP_RAY_SIZE", "HVD_DDP_RAY_LOCAL_RANK", "HVD_DDP_RAY_LOCAL_SIZE",
             job="HVD_DDP_RAY_JOB", also="HVD_DDP_RAY_FOLDER"),
    Launcher("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
             job="HOROVOD_GLOO_RENDEZVOUS_PORT", also="HOROVOD_GLOO_RENDEZVOUS_ADDR"),
    Launcher("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE", job="PMIX_NAMESPACE", mpi="Open MPI"),
    Launcher("pals", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID",
             job="PALS_APID", mpi="MPICH"),
    Launcher("hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", mpi="MPICH", same=("pals",)),
    Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
             "JSM_NAMESPACE_LOCAL_SIZE", job="PMIX_NAMESPACE", mpi="Spectrum MPI", same=("openmpi",)),
    Launcher("flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", job="FLUX_JOB_ID"),
    Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", None, "SLURM_NODEID",
             job="SLURM_STEP_ID", also="SLURM_STEP_ID"),
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """This rank's place in its job. What no environment has is None until the rendezvous has gathered it."""

    launcher: str = "single"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int | None = 1
    node_rank: int | None = 0
    hosts: tuple[str, ...] | None = None  # one a rank
    by_horovodrun: bool = False
    mpi: str | None = None
    job: str = "single"  # the same on all ranks of the job, another in every other job as far as can be known
    scheduler: str | None = None
    scheduler_job: str | None = None
    scheduler_restart: int = 0
    ends_at: float | None = None  # seconds since the epoch, as planned when the job began: see `end_of_allocation`
    cores: int = 1  # of this node, or of this job's part of it
    torchrun_store: tuple[str, int, bool] | None = None  # address, port, whether the agent serves it
    horovodrun_store: tuple[str, int] | None = None
    ray_folder: str | None = None  # of this rank alone: its actor takes rank 0's card from there, or brings it
    interfaces: tuple[str, str] | None = None  # the variable in which the user names interfaces, and its value
    seen: str = "no launcher"  # for the banner: what was seen

    @property
    def nodes(self) -> list[str]:
        """Distinct host names, in the order of their lowest rank."""
        return list(dict.fromkeys(self.hosts or ()))


def detect(environ: Mapping[str, str] | None = None) -> Launch:
    """Read this rank's place from the environment.

    Raises HvdDDPError where the environment contradicts itself, or where several tasks would each train alone.
    """
    env = _started() if environ is None else environ
    rows = [row for row in LAUNCHERS if all(env.get(name) for name in row.required)]
    if not rows:
        _refuse_batch_shell(env)
        _refuse_foreign_rank(env, "single", 0, 1)
        _refuse_half_a_row(env)
        return allocation(env)
    row, outer = rows[0], rows[1:]
    rank, world_size = _number(env, row.rank), _number(env, row.world_size)
    if not 0 <= rank < world_size:
        raise HvdDDPError(
            f"{row.rank} is `{rank}` and {row.world_size} is `{world_size}`, read as set by {row.name}: a rank is at "
            f"least 0 and below the size. Unset them in your script; {row.name} sets them itself."
        )
    _refuse_foreign_rank(env, row.name, rank, world_size)
    local_world_size = _local_world_size(env, row)
    _refuse_several_worlds(env, row, outer, inside_one_node=local_world_size == world_size)
    return Launch(
        launcher=row.name,
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, row.local_rank),
        local_world_size=local_world_size,
        node_rank=_number(env, row.node_rank) if row.node_rank else None,
        hosts=step_hosts(env, world_size) if row.name == "srun" else None,
        by_horovodrun=row.name == "horovodrun" or (row.mpi is not None and _marked(env)),
        mpi=row.mpi,
        job=_job(env, row, find(env), one_node=local_world_size == world_size),
        torchrun_store=_torchrun_store(env) if row.name == "torchrun" else None,
        horovodrun_store=_horovodrun_store(env) if row.name == "horovodrun" else None,
        ray_folder=env["HVD_DDP_RAY_FOLDER"] if row.name == "ray" else None,
        seen=f"{row.rank}={rank} {row.world_size}={world_size}" + (" and horovodrun's mark" if _marked(env) else ""),
        interfaces=_interfaces(env),
        **facts(env),  # type: ignore[arg-type]
    )


def allocation(environ: Mapping[str, str] | None = None) -> Launch:
    """One process, and what the scheduler says of its job: for what trains nothing, so that nothing is refused."""
    env = _started() if environ is None else environ
    return Launch(
        seen="no launcher" + unused(env),
        interfaces=_interfaces(env),
        **facts(env),  # type: ignore[arg-type]
    )


def is_speaker() -> bool:
    """Whether this process is rank 0, or may be as far as its environment tells: it says what all ranks found."""
    row = next((row for row in LAUNCHERS if all(os.environ.get(name) for name in row.required)), None)
    size = os.environ[row.world_size] if row else ""
    return row is None or not size.isdecimal() or os.environ[row.rank] not in map(str, range(1, int(size)))


def variables(*names: str) -> dict[str, str]:
    """Those of these variables that were set when this process began: for doctor, which shows them."""
    env = _started()
    return {name: env[name] for name in names if name in env}


_before: dict[str, str | None] = {}  # what stood where `export` has written: our HOROVOD_RANK is no horovodrun's


def export(values: Mapping[str, str], *, over_the_users: bool = True) -> None:
    """Set variables that a foreign library can only read from the environment. `detect` goes on to see the old ones.

    `over_the_users`: also those that were set when this process began.
    """
    for name, value in values.items():
        before = _before.setdefault(name, os.environ.get(name))
        if over_the_users or not before:
            os.environ[name] = value


def restore() -> None:
    """Undo `export`: what this process starts next, a training of another kind perhaps, is not to inherit it."""
    while _before:
        name, value = _before.popitem()
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _started() -> dict[str, str]:
    """The environment as it was when this process began."""
    return {name: value for name, value in {**os.environ, **_before}.items() if value is not None}


def _interfaces(env: Mapping[str, str]) -> tuple[str, str] | None:
    """The first of these variables that is set; Gloo's is the narrowest, it takes names in full only.

    `lo` is no wish: horovodrun writes it where all hosts that it was given are this one, under whatever names.
    """
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
    return next(((name, env[name]) for name in names if env.get(name, "lo") not in ("", "lo")), None)


def _job(env: Mapping[str, str], row: Launcher, scheduler: Scheduler | None, *, one_node: bool) -> str:
    """What tells this job from others that may run at the same time."""
    name = env.get(row.job or "") or _starter(env, row, one_node=one_node)
    parts = [row.name, name, env.get("TORCHELASTIC_RESTART_COUNT", "")]
    if scheduler:
        parts += [scheduler.job_id(env), env.get(scheduler.restart or "", "")]
    return "-".join(filter(None, parts))


def _starter(env: Mapping[str, str], row: Launcher, *, one_node: bool) -> str:
    """A name for the job where the launcher gives none: by the nearest ancestor that is not this rank or its script."""
    import psutil

    starter, line = psutil.Process().parent(), []
    with contextlib.suppress(psutil.Error):  # what may not be looked into is of another user, so no script of ours
        while starter and (theirs := starter.environ()) and all(theirs.get(n) == env[n] for n in row.required):
            starter = starter.parent()
        line = starter.cmdline() if starter else []
    if "--control-port" in line[:-1]:  # Hydra's, of its mpiexec, the same on all nodes
        return line[line.index("--control-port") + 1]
    return f"{socket.gethostname()}-{starter.pid if starter else 0}" if one_node else ""


def _marked(env: Mapping[str, str]) -> bool:
    # In MPI mode horovodrun itself leaves no variable: our build's launcher exports a mark, and with a stock one
    # only the shell's `_` tells, where a shell started it.
    return env.get(HOROVODRUN_MARK) == "horovodrun" or os.path.basename(env.get("_", "")) == "horovodrun"


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env.get(name, ""))
    except ValueError:
        raise HvdDDPError(f"{name} is `{env.get(name)}`, which is no whole number. Unset it in your script.") from None


def _local_world_size(env: Mapping[str, str], row: Launcher) -> int | None:
    if row.local_world_size:
        return _number(env, row.local_world_size)
    counts = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", "")) if row.name == "srun" else []
    node = _number(env, row.node_rank) if row.node_rank else 0
    return counts[node] if 0 <= node < len(counts) else None


def _torchrun_store(env: Mapping[str, str]) -> tuple[str, int, bool] | None:
    if not env.get("MASTER_ADDR") or not env.get("MASTER_PORT", "").isdecimal():
        return None
    return env["MASTER_ADDR"], int(env["MASTER_PORT"]), env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _horovodrun_store(env: Mapping[str, str]) -> tuple[str, int]:
    return env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], _number(env, "HOROVOD_GLOO_RENDEZVOUS_PORT")


def _refuse_foreign_rank(env: Mapping[str, str], name: str, rank: int, world_size: int) -> None:
    for variable, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if env.get(variable) and env[variable] != str(value):
            start = f"{name} says `{value}`" if name != "single" else "no launcher that is known set it"
            error = HvdDDPError(
                f"{variable} is `{env[variable]}` in the environment, but {start}: the ranks would disagree about the "
                "job. Unset RANK and WORLD_SIZE in your script (nothing here needs them), or start with torchrun."
            )
            error.everywhere = (variable, env[variable]) != ("RANK", "0")  # on rank 0 that is right by chance
            raise error


def _refuse_batch_shell(env: Mapping[str, str]) -> None:
    several = next((name for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES") if env.get(name, "1") != "1"), None)
    if env.get("SLURM_PROCID") == "0" and not env.get("SLURM_STEP_ID") and several:
        raise HvdDDPError(
            f"{several} is `{env[several]}`, but this is the batch shell and no step: only one process would train. "
            "Start it with `srun python -m hvd_ddp ...` in the batch script."
        )


def _refuse_half_a_row(env: Mapping[str, str]) -> None:
    """No row applies, yet something counts ranks: each of them would take itself for the only one."""
    counts = [(name, 1) for row in LAUNCHERS[1:] for name in (row.world_size, row.local_world_size) if name]
    for name, alone in [*((row.rank, 0) for row in LAUNCHERS[1:]), ("PMIX_RANK", 0), *counts]:
        if env.get(name, "").isdecimal() and int(env[name]) > alone:
            raise HvdDDPError(
                f"{name} is `{env[name]}`: a launcher started several ranks, but left no rank, size and local rank "
                "that belong together: each would train alone. Start with torchrun, or unset it if it is a leftover."
            )


def _refuse_several_worlds(
    env: Mapping[str, str], row: Launcher, outer: list[Launcher], *, inside_one_node: bool
) -> None:
    """A launcher inside one task of another is normal; inside each of several tasks it makes as many jobs."""
    for other in outer:
        tasks = _number(env, other.world_size)
        if row.name == "torchrun":
            alone = env.get("GROUP_WORLD_SIZE") == "1"
        else:
            same = all(env[a] == env[b] for a, b in ((row.rank, other.rank), (row.world_size, other.world_size)))
            one_job = row.name == "ray" or (same and row.name in other.same)  # Ray's own daemons are those tasks
            alone = inside_one_node and not one_job
        if tasks > 1 and alone:
            raise HvdDDPError(
                f"{other.name} started `{tasks}` tasks ({other.world_size}), and {row.name} inside each of them forms "
                f"a job of its own: {tasks} trainings would run over each other. Start {row.name} once"
                + (f", or with --nnodes {tasks} and a common --rdzv-endpoint." if row.name == "torchrun" else ".")
            )
