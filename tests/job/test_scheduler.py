"""When does the allocation end: what the schedulers' commands print, and the commands themselves.

squeue's output was seen from Slurm 22.05 and is in squeue(1); that of qstat, bjobs and flux is written after their
documentation and what others published of theirs. The commands are stand-ins on PATH; a real Slurm is in tests/cluster.
"""

import math
import os
import time
from pathlib import Path

import pytest

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job import scheduler as module
from hvd_ddp.job.launch import Launch, detect
from hvd_ddp.job.scheduler import end_of_allocation, flux_end, lsf_end, pbs_end, slurm_end

NOW = 1_700_000_000.0
MINUTE, HOUR, DAY = 60, 3600, 86400

# Slurm


@pytest.mark.parametrize(
    ("left", "seconds"),
    [("0:01", 1), ("59:59", 59 * MINUTE + 59), ("1:00:00", HOUR), ("23:59:07", DAY - 53), ("1-00:00:00", DAY),
     ("12-10:02:03", 12 * DAY + 10 * HOUR + 2 * MINUTE + 3), ("0:00", 0), ("INVALID", 0), ("UNLIMITED", math.inf)],
)  # fmt: skip
def test_slurm(left: str, seconds: float) -> None:
    assert slurm_end(f"17 {left}\n", "17", NOW) == NOW + seconds


def test_slurm_lists_all_jobs_of_an_array() -> None:
    """The last job of an array bears the number of the whole: `squeue -j` takes it for the whole."""
    assert slurm_end("19 UNLIMITED\n17 10:00\n18 5:00\n", "17", NOW) == NOW + 10 * MINUTE


@pytest.mark.parametrize(
    "output", ["", "17 NOT_SET\n", "17\n", "18 5:00\n", "17 5:0x\n", "JOBID TIME_LEFT\n", "17 5\n"]
)
def test_slurm_says_nothing(output: str) -> None:
    with pytest.raises(ValueError, match="time left"):
        slurm_end(output, "17", NOW)


# PBS


def torque(**changed: str | None) -> str:
    """`qstat -f` of Torque, of a job that started at 10:00 and was asked for after a quarter of an hour."""
    return (
        qstat("  ", "start_time", changed)
        + "    Walltime.Remaining = 6300\n    start_count = 1\n    submit_host = login\n"
    )


def openpbs(**changed: str | None) -> str:
    """The same of PBS Pro and OpenPBS."""
    return (
        qstat("  ", "stime", changed)
        + "    run_count = 1\n    eligible_time = 00:00:02\n    project = _pbs_project_default\n"
    )


def qstat(indent: str, start: str, changed: dict[str, str | None]) -> str:
    values: dict[str, str | None] = {
        "Job_Name": "train",
        "Job_Owner": "someone@login.example",
        "resources_used.cput": "00:55:00",
        "resources_used.walltime": "00:13:30",
        "job_state": "R",
        "ctime": "Tue Nov 14 09:59:58 2023",
        "Error_Path": "login.example:/scratch/someone/a/path/that/is/long/enough/to/be/cut/her\n\te/train.e17",
        "Resource_List.nodect": "2",
        "Resource_List.walltime": "02:00:00",
        start: "Tue Nov 14 10:00:00 2023",
        # values that look like other attributes: in a wrapped line, and in the middle of one
        "Variable_List": "PBS_O_HOME=/home/someone,A=Resource_List.walltime = 09:00:00,\n\tResource_List.walltime = 8",
        "etime": "Tue Nov 14 09:59:58 2023",
    } | changed  # fmt: skip
    return "Job Id: 17.server.example\n" + "".join(
        f"  {indent}{name} = {value}\n" for name, value in values.items() if value is not None
    )


STARTED = time.mktime((2023, 11, 14, 10, 0, 0, 0, 0, -1))
ASKED = STARTED + 15 * MINUTE


@pytest.mark.parametrize("kind", [torque, openpbs])
def test_pbs(kind: object) -> None:
    def end(**changed: str | None) -> float:
        return pbs_end(kind(**changed), "17.server.example", ASKED)  # type: ignore[operator]

    assert end() == STARTED + 2 * HOUR
    assert end(**{"resources_used.walltime": None}) == STARTED + 2 * HOUR, "the job has only just begun"
    assert end(**{"Resource_List.walltime": "168:00:00"}) == STARTED + 7 * DAY
    assert end(**{"Resource_List.walltime": "1:00:00:00"}) == STARTED + DAY
    assert end(**{"Resource_List.walltime": "90"}) == STARTED + 90
    assert end(**{"Resource_List.walltime": "10:30"}) == STARTED + 10 * MINUTE + 30
    assert end(**{"Resource_List.walltime": None}) == math.inf
    assert end(**{"Resource_List.walltime": None, "Resource_List.cput": "100:00:00"}) == math.inf


def test_pbs_walltime_stands_still_while_a_job_is_suspended() -> None:
    """Asked after 90 minutes, of which the job ran 13: it has another 106, less by how much that may be late."""
    assert pbs_end(openpbs(), "17", STARTED + 90 * MINUTE) == STARTED + (90 + 120 - 13.5) * MINUTE - module.STALE


def test_pbs_without_a_start() -> None:
    assert pbs_end(openpbs(stime=None), "17", ASKED) == ASKED + 106.5 * MINUTE - module.STALE
    with pytest.raises(ValueError, match="start"):
        pbs_end(openpbs(stime=None, **{"resources_used.walltime": None}), "17", ASKED)


@pytest.mark.parametrize(
    "output", ["", "Job Id: 17\n", openpbs(stime="soon"), openpbs(**{"Resource_List.walltime": "long"})]
)
def test_pbs_says_nothing(output: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        pbs_end(output, "17", NOW)


# LSF, Flux


@pytest.mark.parametrize(
    ("output", "seconds"),
    [("0:59 L\n", 59 * MINUTE), ("120:05 L", 120 * HOUR + 5 * MINUTE), ("00:59:30 L\n", 59 * MINUTE + 30),
     ("-\n", math.inf)],
)  # fmt: skip
def test_lsf(output: str, seconds: float) -> None:
    assert lsf_end(output, "7001", NOW) == NOW + seconds


@pytest.mark.parametrize("output", ["", "0:59 E", "0:10 X", "TIME_LEFT\n0:59 L", "soon"])
def test_lsf_says_nothing(output: str) -> None:
    """An estimate (E, X) ends no job."""
    with pytest.raises(ValueError, match="time left"):
        lsf_end(output, "7001", NOW)


def test_flux() -> None:
    assert flux_end("3599\n", "f1", NOW) == NOW + 3599
    assert flux_end("0\n", "f1", NOW) == NOW
    assert flux_end("4294967295\n", "f1", NOW) == math.inf
    with pytest.raises(ValueError, match="time left is `never`"):
        flux_end("never", "f1", NOW)


# The commands


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on PATH, for commands that no scheduler is behind."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return tmp_path


def write(path: Path, script: str) -> None:
    path.write_text(f'#!/bin/sh\necho "$0" "$@" > {path}.called\n{script}\n')
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("name", "job", "command", "output", "arguments"),
    [
        ("slurm", "17", "squeue", "17 1:00:00", "--noheader --jobs=17 --states=all --format=%A %L"),
        ("pbs", "17[4].server", "qstat", None, "-f 17[4].server"),
        ("lsf", "7001[4]", "bjobs", "1:00 L", "-noheader -o time_left 7001[4]"),
        ("flux", "ƒd6pySYjTR", "flux", "3600", "job timeleft ƒd6pySYjTR"),
    ],
)
def test_ask(stand_in: Path, name: str, job: str, command: str, output: str | None, arguments: str) -> None:
    now = time.time()
    started = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(now))
    write(
        stand_in / command,
        f"cat <<'end'\n{output or openpbs(stime=started, **{'Resource_List.walltime': '1:00:00'})}\nend",
    )
    assert end_of_allocation(name, job) == pytest.approx(now + HOUR, abs=5)
    assert (stand_in / f"{command}.called").read_text() == f"{stand_in / command} {arguments}\n"


def test_the_scheduler_knows_better_than_the_environment(stand_in: Path) -> None:
    """`scontrol update` moves the limit of a running job."""
    write(stand_in / "squeue", "echo 17 2:00:00")
    assert end_of_allocation("slurm", "17", time.time() + HOUR) == pytest.approx(time.time() + 2 * HOUR, abs=5)
    write(stand_in / "squeue", "echo 17 UNLIMITED")
    assert end_of_allocation("slurm", "17", time.time() + HOUR) == math.inf


BROKEN = {
    "exit 1": "it ended with 1",
    "echo 17 5:00; echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1": "Invalid job id specified",
    "echo 17 NOT_SET": "the time left is `NOT_SET`",
    "exit 0": "the time left is ``",
    "printf '\\377'": "the time left is ``",
}


@pytest.mark.parametrize("script", BROKEN)
def test_a_command_that_does_not_answer(stand_in: Path, script: str) -> None:
    write(stand_in / "squeue", script)
    assert end_of_allocation("slurm", "17", NOW) == NOW, "what the environment said stands in"
    with pytest.raises(HvdDDPError) as caught:
        end_of_allocation("slurm", "17")
    text = str(caught.value)
    for word in ("slurm job `17`", "`squeue ", BROKEN[script], "--stop-before", "--signal"):
        assert word in text, text
    assert "\n" not in text


def test_a_command_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert end_of_allocation("slurm", "17", NOW) == NOW
    for name, command in (("slurm", "squeue"), ("pbs", "qstat"), ("lsf", "bjobs"), ("flux", "flux")):
        with pytest.raises(HvdDDPError, match=f"there is no {command} on PATH"):
            end_of_allocation(name, "17")
    (tmp_path / "squeue").write_text("no program")
    with pytest.raises(HvdDDPError, match="Permission denied"):
        end_of_allocation("slurm", "17")


def test_a_command_that_hangs(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when what it started holds its output open."""
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    write(stand_in / "squeue", "sleep 20")
    before = time.monotonic()
    with pytest.raises(HvdDDPError, match=r"no answer in 0\.5 s"):
        end_of_allocation("slurm", "17")
    assert time.monotonic() - before < 5


@pytest.mark.parametrize("launch", [detect({}), detect({"RANK": "0"}), Launch(scheduler="sge", scheduler_job="7")])
def test_no_scheduler(launch: Launch) -> None:
    with pytest.raises(HvdDDPError, match="--stop-before counts from the end of the allocation") as caught:
        end_of_allocation(launch.scheduler, launch.scheduler_job, launch.ends_at)
    assert "SLURM_JOB_ID, PBS_JOBID, LSB_JOBID, FLUX_JOB_ID" in str(caught.value)


def test_what_launch_tells() -> None:
    launch = detect({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": "1700000000"})
    assert (launch.scheduler, launch.scheduler_job, launch.ends_at) == ("slurm", "17", NOW)
    assert detect({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": "soon"}).ends_at is None
    assert detect({"SLURM_JOB_ID": "17"}).ends_at is None
    # a job array of LSF has one number; those of Slurm and PBS have one for each job
    assert detect({"LSB_JOBID": "7001", "LSB_JOBINDEX": "0"}).scheduler_job == "7001"
    assert detect({"LSB_JOBID": "7001", "LSB_JOBINDEX": "4"}).scheduler_job == "7001[4]"
    assert detect({"LSB_JOBID": "7001"}).scheduler_job == "7001"
    assert detect({"LSB_JOBID": "7001", "LSB_RESTART": "Y"}).scheduler_restart == 0, (
        "it tells of one kind, and no number"
    )
    assert detect({"PBS_JOBID": "17[4].server", "PBS_ARRAY_INDEX": "4"}).scheduler_job == "17[4].server"
