"""doctor: what works here, across all ranks when started with several; each failure with its remedy."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_ddp.commands.options import command_line
from hvd_ddp.doctor import files, machine, place, software
from hvd_ddp.doctor.check import Check, Examination, Patient, bounded, examine, failure, refused
from hvd_ddp.doctor.gathering import Answers, Gathering, NobodyError, gather
from hvd_ddp.doctor.nodes import nodes
from hvd_ddp.doctor.reduce import all_reduce, answer
from hvd_ddp.doctor.report import Report, show, summary, to_json, worst
from hvd_ddp.doctor.together import attendance, clocks, common_files, look, same_data, versions
from hvd_ddp.doctor.ways import knock, open_door, ways
from hvd_ddp.errors import FAILED, FINISHED, HvdDDPError
from hvd_ddp.job.launch import Launch, allocation, detect, is_speaker

NEEDED = ("launcher", "ranks", "torch", "interfaces", "ports", "ways between hosts")  # by every all_reduce
DAY = 86400.0  # seconds
SILENCE = 2.0  # seconds that a rank stays which leaves the word to rank 0: mpirun kills all when the first has left


@dataclass(frozen=True)
class Options:
    """Examine this machine, or start it like a training to examine all ranks: srun python -m hvd_ddp doctor.

    A failure is what training would fail on, a warning what costs speed or hurts other programs. At the end all ranks,
    or two on this machine, reduce a tensor for a second under each backend. Exit code 1 with a failure.
    """

    run_dir: Path = Path("runs")
    """Where runs are to be written."""
    data_dir: Path | None = None
    """Folder of a data set's files; None: no data is looked at."""
    start_timeout: float = 60.0
    """Seconds to wait for all ranks; then those that came go on."""
    timeout: float = 60.0
    """Seconds that anything asked of another program may take, such as importing torch."""
    json: bool = False
    """Print one JSON object and nothing else, a check of each rank by itself."""

    def __post_init__(self) -> None:
        """Raise ValueError where nothing would be awaited."""
        for name in ("timeout", "start_timeout"):
            if not 0 < getattr(self, name) < DAY:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is `{getattr(self, name)}`. Give seconds, above 0 and below a day.")


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp doctor`."""
    speaks = is_speaker()
    options = command_line(Options, arguments, "doctor", show_errors=speaks)
    try:
        launch, problem = detect(), []
    except HvdDDPError as error:
        if error.everywhere and not speaks:
            time.sleep(SILENCE)
            return FAILED
        launch, problem = allocation(), [refused("launcher", error)]
    patient = Patient(launch, options.run_dir, options.data_dir, options.timeout)
    try:
        gathering = gather(launch, options.run_dir, options.start_timeout)
    except NobodyError as error:
        return _alone(options, patient, [*problem, failure("ranks", error.detail, error.remedy)])
    answers: Answers = {
        "examine": lambda _: _report(patient).to_dict(),
        "door": lambda addresses: open_door(addresses[str(launch.rank)]),
        "knock": knock,
        "look": look,
        "reduce": lambda name: answer(name, patient),
    }
    if launch.rank == 0:
        return _lead(options, patient, gathering, answers, problem)
    try:
        return gathering.serve(answers, options.start_timeout + 10 * options.timeout)
    except NobodyError as error:
        return _alone(options, patient, [failure("ranks", error.detail, error.remedy)])


def _lead(options: Options, patient: Patient, gathering: Gathering, answers: Answers, problem: list[Check]) -> int:
    """Rank 0: ask all, judge, and say it."""
    world_size, seconds = patient.launch.world_size, options.timeout
    hosts = [gathering.peers[rank].host if rank in gathering.peers else "?" for rank in range(world_size)]
    told = gathering.ask("examine", None, list(gathering.peers), answers, 2 * seconds)
    reports = {rank: Report.from_dict(values) for rank, values in sorted(told.items())}
    silent = failure("ranks", "came, but does not answer", "See its node.")
    checks = [*problem, *attendance(gathering)] if world_size > 1 else list(problem)
    checks += [replace(silent, rank=rank) for rank in gathering.peers if rank not in reports]
    checks += [check for report in reports.values() for check in report.checks]
    checks += nodes(gathering, reports)
    if world_size > 1:
        checks += versions(reports)
    if len(gathering.hosts) > 1:
        checks += [*clocks(gathering), *ways(gathering, answers, seconds)]
        checks += same_data(gathering, patient, reports)
        checks += bounded("common files", 4 * seconds, lambda: common_files(gathering, patient, answers))
    if problem:
        checks = [check for check in checks if check in problem or check.name != "launcher"]
    if not options.json:  # what follows may make the launcher end the job
        show(checks, hosts, plain=_plain(patient.launch))
    signal.signal(signal.SIGTERM, lambda *_: _cut_short(options, patient, checks, hosts))
    in_the_way = dict.fromkeys(check.name for check in checks if check.status == "failure" and check.name in NEEDED)
    for check in all_reduce(gathering, patient, answers, reports, in_the_way=list(in_the_way)):
        checks.append(check)
        if not options.json:
            show([check], hosts, plain=_plain(patient.launch))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is known, and is said once
    print(to_json(checks) if options.json else summary(checks, hosts), flush=True)
    code = FAILED if worst(checks) == "failure" else FINISHED
    gathering.end(code)
    return code


def _cut_short(options: Options, patient: Patient, checks: list[Check], hosts: list[str]) -> None:
    """Say all on rank 0 when the launcher ends the job, as it does where a library aborts a rank."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # some launchers send it twice
    what = patient.facts.get("trying", "all_reduce")
    detail = "the launcher ended the job while this was tried: a library aborted a rank, or somebody sent TERM"
    check = failure(what, detail, "See the lines of MPI, and this backend alone with --max-steps 2.")
    if not options.json:
        show([check], hosts, plain=True)
    print(to_json([*checks, check]) if options.json else summary([*checks, check], hosts), flush=True)
    os._exit(FAILED)


def _alone(options: Options, patient: Patient, problem: list[Check]) -> int:
    """Of a rank that rank 0 does not hear: say what is wrong here, once a node, on stderr but for rank 0."""
    launch = patient.launch
    if launch.rank and launch.local_rank:
        return FAILED
    checks = [*problem, *_report(patient).checks]
    if launch.rank == 0:
        print(to_json(checks)) if options.json else show(checks, [""] * launch.world_size, plain=_plain(launch))
        return FAILED
    for check in checks:
        if check.status == "failure":
            where = f"rank {launch.rank} on {socket.gethostname()}"
            print(f"hvd_ddp doctor: {where}: {check.name}: {check.detail}. {check.remedy}", file=sys.stderr, flush=True)
    return FAILED


def _plain(launch: Launch) -> bool:
    """mpirun gives its ranks a terminal of its own even when its own output goes to a file."""
    return launch.mpi is not None or not sys.stdout.isatty()


def _report(patient: Patient) -> Report:
    checks = examine(patient, _examinations(patient.launch))
    return Report(checks, patient.versions, patient.facts)


def _examinations(launch: Launch) -> dict[str, Examination]:
    """What this rank looks at: of some things one rank a node is enough, and only one may ask the scheduler."""
    everywhere: dict[str, Examination] = {
        "launcher": place.launcher,
        "python": software.python,
        "torch": software.torch_and_horovod,
        "mpi": software.mpi,
        "processors": machine.processors,
        "/dev/shm": machine.shared_memory,
        "descriptors": machine.descriptors,
    }
    a_node: dict[str, Examination] = {
        "host": place.host,
        "network": place.network,
        "locked memory": machine.locked_memory,
        "run directory": files.run_directory,
        "data directory": files.data_directory,
    }
    once: dict[str, Examination] = {"scheduler": place.scheduler, "srun types": place.srun_types}
    return {
        **(once if launch.rank == 0 else {}),
        **everywhere,
        **(a_node if launch.local_rank == 0 else {}),
    }
