"""Which batch system gave us these nodes, and until when: the table of schedulers. It says nothing of ranks."""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvd_ddp.errors import HvdDDPError

PATIENCE = 10.0  # seconds for a scheduler's command: its server may be down, and the run must not wait for it
STALE = 600.0  # seconds by which PBS's resources_used may lag behind (Torque's job_stat_rate is 45 to 300)
FLUX_UNLIMITED = 2**32 - 1


@dataclass(frozen=True)
class Scheduler:
    """One row: the variables of a batch system, and how to ask it when a job ends."""

    name: str
    job: str
    command: tuple[str, ...]  # that asks; `{job}` stands for the job
    ending: Callable[[str, str, float], float]  # (its output, the job, now) -> the end, as `end_of_allocation` says it
    index: str | None = None  # in a job array: which of its jobs, where `job` is the same for all
    restart: str | None = None
    cores: str | None = None
    ends_at: str | None = None  # seconds since the epoch, as planned when the job began
    sizes: tuple[tuple[str, str], ...] = ()  # (variable, what it counts) of what more than one process could use
    start: str = ""  # what starts one process for each

    def job_id(self, environ: Mapping[str, str]) -> str:
        """The job as the scheduler's commands take it: `7001`, or `7001[4]` of a job array."""
        index = environ.get(self.index or "", "0")
        return environ[self.job] + (f"[{index}]" if index.strip("0") else "")


def slurm_end(output: str, job: str, now: float) -> float:
    """From `squeue --format="%A %L"`: a line a job, and its time left as [days-][hours:]minutes:seconds.

    For one number squeue lists all the jobs of an array: the line that counts begins with ours.
    """
    lines = [line.split() for line in output.splitlines()]
    left = next((words[1] for words in lines if len(words) == 2 and words[0] == job), "")
    if left == "UNLIMITED":
        return math.inf
    if left == "INVALID":  # less than nothing is left: the job runs over its limit (OverTimeLimit)
        return now
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", left)
    if not found:
        raise ValueError(f"the time left is `{left}`")
    days, hours, minutes, seconds = (int(text or 0) for text in found.groups())
    return now + ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def pbs_end(output: str, job: str, now: float) -> float:
    """From `qstat -f` of PBS Pro, OpenPBS (`stime`) and Torque (`start_time`): one `name = value` a line.

    A long value goes on in lines that begin with a tab. A job without a walltime has no limit. While a job is suspended
    its walltime stands still, which only the walltime used tells; that one lags behind.
    """
    found: dict[str, str] = {}
    for name, value in re.findall(r"^\s*([\w.]+) = (.*)$", output.replace("\n\t", ""), re.MULTILINE):
        found.setdefault(name, value.strip())
    if "job_state" not in found:
        raise ValueError("it says nothing of the job")
    if "Resource_List.walltime" not in found:
        return math.inf
    limit = _pbs_duration(found["Resource_List.walltime"])
    ends = []
    if started := found.get("stime") or found.get("start_time"):  # local time, as ctime(3) writes it
        ends.append(time.mktime(time.strptime(started, "%a %b %d %H:%M:%S %Y")) + limit)
    if used := found.get("resources_used.walltime"):
        ends.append(now + limit - _pbs_duration(used) - STALE)
    if not ends:
        raise ValueError("it names neither the start of the job nor its time used")
    return max(ends)


def _pbs_duration(text: str) -> float:
    """Seconds of `[[[days:]hours:]minutes:]seconds`."""
    parts = [float(part) for part in reversed(text.split(":"))]
    return sum(part * unit for part, unit in zip(parts, (1, 60, 3600, 86400), strict=False))


def lsf_end(output: str, job: str, now: float) -> float:
    """From `bjobs -o time_left`: `0:59 L` (hours:minutes[:seconds]), or `-` for no limit.

    L says that this is the limit. E and X are of an estimate (`bsub -We`), which ends no job.
    """
    if output.strip() == "-":
        return math.inf
    found = re.fullmatch(r"(\d+):(\d+)(?::(\d+))? L", output.strip())
    if not found:
        raise ValueError(f"the time left is `{' '.join(output.split())}`")
    hours, minutes, seconds = (int(text or 0) for text in found.groups())
    return now + (hours * 60 + minutes) * 60 + seconds


def flux_end(output: str, job: str, now: float) -> float:
    """From `flux job timeleft`: whole seconds; UINT_MAX or more for no limit."""
    if not output.strip().isdecimal():
        raise ValueError(f"the time left is `{' '.join(output.split())}`")
    left = int(output)
    return math.inf if left >= FLUX_UNLIMITED else now + left


# Slurm: squeue(1), srun(1), its src/squeue/print.c. The rest is from documentation and scripts that others published,
# not run here. PBS: qstat(1B), pbs_job_attributes(7B); how often a job was requeued stands in no variable. LSF: bjobs,
# "Environment variables set for job execution"; its LSB_RESTART=Y tells that a job was rerun, not how often, and not of
# a brequeue. Flux: flux-job(1), "timeleft".
SCHEDULERS: tuple[Scheduler, ...] = (
    Scheduler(
        "slurm",
        "SLURM_JOB_ID",
        ("squeue", "--noheader", "--jobs={job}", "--states=all", "--format=%A %L"),
        slurm_end,
        restart="SLURM_RESTART_COUNT",
        cores="SLURM_CPUS_ON_NODE",
        ends_at="SLURM_JOB_END_TIME",
        sizes=(("SLURM_JOB_NUM_NODES", "nodes"), ("SLURM_NTASKS", "tasks")),
        start="srun",
    ),
    Scheduler("pbs", "PBS_JOBID", ("qstat", "-f", "{job}"), pbs_end, cores="NCPUS"),
    Scheduler("lsf", "LSB_JOBID", ("bjobs", "-noheader", "-o", "time_left", "{job}"), lsf_end, index="LSB_JOBINDEX"),
    Scheduler("flux", "FLUX_JOB_ID", ("flux", "job", "timeleft", "{job}"), flux_end),
)


def find(environ: Mapping[str, str]) -> Scheduler | None:
    """The row whose job this environment is of."""
    return next((row for row in SCHEDULERS if environ.get(row.job)), None)


def facts(environ: Mapping[str, str]) -> dict[str, object]:
    """Those fields of `Launch` that the scheduler knows."""
    row = find(environ)
    if row is None:
        return {"cores": os.cpu_count() or 1}
    cores, restart, end = (environ.get(name or "", "") for name in (row.cores, row.restart, row.ends_at))
    return {
        "scheduler": row.name,
        "scheduler_job": row.job_id(environ),
        "scheduler_restart": int(restart) if restart.isdecimal() else 0,
        "ends_at": float(end) if end.isdecimal() else None,
        "cores": int(cores) if cores.isdecimal() else os.cpu_count() or 1,
    }


def unused(environ: Mapping[str, str]) -> str:
    """For the banner of a process that no launcher started: what of its allocation lies idle. Empty without one."""
    row = find(environ)
    if row is None:
        return ""
    inside = f", inside {row.name} job {row.job_id(environ)}"
    for variable, things in row.sizes:
        size = environ.get(variable, "")
        if size.isdecimal() and int(size) > 1:
            return f"{inside} of {size} {things}: only this process trains; start with {row.start} to use them"
    return inside


def end_of_allocation(scheduler: str | None, job: str | None, ends_at: float | None = None) -> float:
    """When the scheduler ends this job: seconds since the epoch, `math.inf` where nothing limits it.

    The first three fields of `Launch` that are named alike. The scheduler is asked, since a limit may be moved while
    the job runs; `ends_at`, what the environment said at its start, stands in where it can't be (in a container).
    Takes up to 10 s, so one rank should ask for all. Raises HvdDDPError where the end can't be learnt.
    """
    row = next((row for row in SCHEDULERS if row.name == scheduler), None)
    if row is None or job is None:
        known = ", ".join(row.job for row in SCHEDULERS)
        raise HvdDDPError(
            f"--stop-before counts from the end of the allocation, but there is none (none of `{known}` is set): it "
            "would never stop. Leave it out, or start inside a job."
        )
    command = [word.replace("{job}", job) for word in row.command]
    try:
        return row.ending(_answer(command), job, time.time())
    except ValueError as error:
        if ends_at is not None:
            return ends_at
        raise HvdDDPError(
            f"When {row.name} job `{job}` ends can't be learnt from `{' '.join(command)}` ({error}): --stop-before "
            "would never stop. Make that command work on rank 0's node, or leave --stop-before out and have the "
            "scheduler send a signal (--signal)."
        ) from error


def _answer(command: list[str]) -> str:
    """What the command prints. Raises ValueError with the reason where it does not, or not in time."""
    try:
        result = subprocess.run(  # no shell: a job's name is no script
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=PATIENCE
        )
    except FileNotFoundError:
        raise ValueError(f"there is no {command[0]} on PATH") from None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    except subprocess.TimeoutExpired:
        raise ValueError(f"no answer in {PATIENCE:g} s") from None
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"it ended with {result.returncode}"]
        raise ValueError(lines[-1].strip())
    return result.stdout


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's short form: `2(x3),1` is [2, 2, 2, 1]."""
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        return []  # nothing, or not what Slurm writes: the rendezvous counts
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in found for _ in range(int(times or 1))]


def step_hosts(environ: Mapping[str, str], world_size: int) -> tuple[str, ...] | None:
    """Hosts of Slurm's step, one a rank, where its distribution tells; who is where is gathered later anyway.

    SLURM_DISTRIBUTION is one word for nodes, then perhaps words for sockets and cores (`cyclic:block`), which move no
    rank to another node: `format_task_dist_states` in its src/common/proc_args.c.
    """
    counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    kind = re.split("[:,]", environ.get("SLURM_DISTRIBUTION", "block"))[0]
    if not nodes or kind not in ("block", "cyclic") or sum(counts) != world_size:
        return None
    from ClusterShell.NodeSet import NodeSet

    placed = [(turn, node) for node, count in enumerate(counts) for turn in range(count)]
    if kind == "cyclic":  # one a node in turn, past nodes that are full
        placed.sort()
    names = list(NodeSet(nodes))
    return tuple(names[node] for _, node in placed) if len(names) == len(counts) else None
