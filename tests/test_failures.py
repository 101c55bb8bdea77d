"""A rank that fails ends the whole job within --timeout and 10 s, and the last lines say which one, where and why."""

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import false_alarms
import pytest
import torch
from launchers import ROOT, Result, assert_none_left, command, run

HOST = socket.gethostname()
TIMEOUT, MORE = 8, 10  # seconds: of --timeout in these jobs, and what the promise allows on top
MESSAGE = re.compile(r"hvd_ddp: rank (\d+) on (\S+) (failed|last seen) in (.+?) at step (\d+): (.+)")

# What rank R does in its fifth forward -> what is said of it. `last seen`: by another rank, from its last heartbeat.
SAID = {
    "throw": ("failed", "RuntimeError: the sensor is on fire"),
    "leave": ("failed", "SystemExit: 0"),
    "die": ("last seen", "its process is gone without a word"),
    "halt": ("last seen", "it has been silent for"),
    "hang": ("failed", "it has stood still for"),
}
CELLS = [
    ("--nproc", "ddp", "throw@0"),
    ("--nproc", "ddp", "leave@1"),
    ("--nproc", "ddp", "die@1"),
    ("--nproc", "ddp", "halt@0"),
    ("--nproc", "ddp", "hang@1"),
    ("mpirun", "ddp", "throw@1"),
    ("mpirun", "horovod", "hang@0"),
    ("torchrun", "ddp", "die@0"),
    ("horovodrun", "horovod", "die@1"),
    ("horovodrun --gloo", "horovod", "halt@0"),
    ("mpiexec.mpich", "ddp", "throw@1"),
]
LAUNCHERS = [("--nproc", "ddp"), ("--nproc", "horovod"), ("torchrun", "ddp"), ("torchrun", "horovod"),
             ("mpirun", "ddp"), ("mpirun", "horovod"), ("horovodrun", "horovod"), ("horovodrun --gloo", "horovod"),
             ("mpiexec.mpich", "ddp")]  # fmt: skip
ALL = [(*where, f"{what}@{rank}") for where in LAUNCHERS for what in SAID for rank in (0, 1)]
REST = [cell for cell in ALL if cell not in CELLS and (cell[0], cell[2][:3]) != ("mpiexec.mpich", "die")]


def start(
    launcher: str, backend: str, model: str, folder: Path, *options: str, fault: str = "none@9", num_ranks: int = 2
) -> Result:
    """Twelve steps of a model of factories.py; afterwards no process of the job is there."""
    program = ["-m", "hvd_ddp", "train", "--threads", "1", "--model", f"factories:{model}", "--backend", backend,
               "--run-dir", str(folder / "run"), "--max-steps", "12", "--timeout", str(TIMEOUT), *options]  # fmt: skip
    paths, mark = f"{ROOT}:{ROOT / 'tests'}", f"mark of {folder}"
    job = command(launcher, num_ranks, program)
    result = run(job, timeout=100, cwd=folder, PYTHONPATH=paths, FAULT=fault, MARK=mark)
    assert_none_left(mark)
    return result


def messages(result: Result) -> list[str]:
    """All that hvd_ddp itself says of a failure; launchers may put something before it."""
    return [line[line.index("hvd_ddp: ") :] for line in result.text.splitlines() if "hvd_ddp: " in line]


def record(folder: Path) -> dict[str, Any]:
    """The only one that there is."""
    [path] = (folder / "run/failures/0").glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    assert path.name == f"rank_{found['rank']:04d}.json"
    assert abs(found["time"] - time.time()) < 100
    return found


def fails(
    launcher: str, backend: str, fault: str, folder: Path, num_ranks: int = 2, model: str = "Faulty"
) -> tuple[str, ...]:
    """Start a job with that fault; what its one message says: (rank, host, failed or last seen, phase, step, words)."""
    result = start(launcher, backend, model, folder, fault=fault, num_ranks=num_ranks)
    assert (folder / "fault").exists(), result.text[-3000:]
    took = time.time() - float((folder / "fault").read_text())
    assert took < TIMEOUT + MORE, result.text[-3000:]
    assert result.code != 0
    assert len(messages(result)) == 1, result.text[-3000:]
    found = MESSAGE.fullmatch(messages(result)[0])
    assert found, messages(result)
    assert json.loads((folder / "run/summary.json").read_text())["status"] == "failed"
    return found.groups()


def check_fault(launcher: str, backend: str, fault: str, folder: Path) -> None:
    what, _, rank = fault.partition("@")
    number, host, how, phase, step, words = fails(launcher, backend, fault, folder)
    assert (number, host, how) == (rank, HOST, SAID[what][0])
    assert words.startswith(SAID[what][1])
    if how == "failed":
        assert (phase, step) == ("forward", "4")
    known = record(folder)
    assert (known["rank"], known["host"]) == (int(rank), HOST)
    assert (known["phase"], known["step"]) == (phase, int(step))
    assert known["exception"] == words
    if what in ("throw", "leave"):
        assert "in forward" in known["traceback"]
        assert words in (folder / f"run/logs/0/rank_{int(rank):04d}.log").read_text()
    if what == "hang":
        assert "in hang" in (folder / f"run/failures/0/rank_{int(rank):04d}.stacks").read_text()
    if (what, rank) not in {("die", "0"), ("halt", "0")}:  # rank 0 holds it, and could not give it back
        assert not (folder / "run/lock.json").exists()


@pytest.mark.parametrize(("launcher", "backend", "fault"), CELLS)
def test_a_fault_ends_the_job(launcher: str, backend: str, fault: str, tmp_path: Path) -> None:
    check_fault(launcher, backend, fault, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "backend", "fault"), REST)
def test_any_fault_under_any_launcher_ends_the_job(launcher: str, backend: str, fault: str, tmp_path: Path) -> None:
    check_fault(launcher, backend, fault, tmp_path)


PHASES = ["loading data", "forward", "backward", "averaging gradients", "updating parameters", "logging", "evaluating",
          "saving"]  # fmt: skip
STOPPED = [(launcher, backend, phase, rank) for phase in PHASES for rank in (0, 1)
           for launcher, backend in (("--nproc", "ddp"), ("mpirun", "horovod"))]  # fmt: skip
OFTEN = [("--nproc", "ddp", "saving", 0), ("mpirun", "horovod", "averaging gradients", 1)]


@pytest.mark.parametrize(
    ("launcher", "backend", "phase", "rank"),
    [pytest.param(*cell, marks=[] if cell in OFTEN else pytest.mark.full) for cell in STOPPED],
)
def test_a_rank_that_is_stopped_is_named_with_its_phase(
    launcher: str, backend: str, phase: str, rank: int, tmp_path: Path
) -> None:
    number, _, how, last, step, words = fails(launcher, backend, f"{phase}@{rank}", tmp_path, model="StopsIn")
    assert (number, how, last) == (str(rank), "last seen", phase) and int(step) >= 4
    assert words.startswith(SAID["halt"][1])


def test_the_few_that_skipped_a_collective_are_named(tmp_path: Path) -> None:
    """Two of three wait in it, inside their forward, and the third waits for their gradients."""
    rank, host, how, _, step, words = fails("--nproc", "horovod", "skip@1", tmp_path, num_ranks=3)
    assert (rank, host, how, step) == ("1", HOST, "failed", "4")
    assert "stood still" in words
    assert "2 ranks (0, 2) in forward at step 4" in words
    assert record(tmp_path)["rank"] == 1
    stacks = [tmp_path / f"run/failures/0/rank_{rank:04d}.stacks" for rank in range(3)]
    assert all("File " in path.read_text() for path in stacks)


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=pytest.mark.full)])
def test_one_of_two_that_skipped_a_collective(backend: str, tmp_path: Path) -> None:
    """Each waits for the other: who is at fault can't be known, so that both are told. Gloo may see it first."""
    rank, host, how, _, _, words = fails("--nproc", backend, "skip@1", tmp_path)
    assert host == HOST
    if how == "failed":
        assert "gloo" in words or f"rank {1 - int(rank)} on {HOST}" in words
    else:
        assert backend == "ddp", "Gloo ends a process whose messages have another size"
    assert str(record(tmp_path)["rank"]) == rank


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_mpich_kills_the_others_of_a_killed_rank(rank: int, tmp_path: Path) -> None:
    """At once, with SIGKILL: none may be left to say a word, but the job ends, and MPICH says how."""
    result = start("mpiexec.mpich", "ddp", "Faulty", tmp_path, fault=f"die@{rank}")
    assert time.time() - float((tmp_path / "fault").read_text()) < TIMEOUT + MORE
    assert result.code != 0
    assert "signal 9" in result.text
    assert len(messages(result)) <= 1
    assert all(f"rank {rank} on {HOST}" in message for message in messages(result))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the undisturbed run."""
    folder = tmp_path_factory.mktemp("wanted")
    result = start("--nproc", "ddp", "Faulty", folder)
    assert result.code == 0, result.text[-3000:]
    return weights(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = torch.load(
        folder / "run/checkpoints/step_00000012.pt", weights_only=True
    )["model"]  # fmt: skip
    return model


@pytest.mark.parametrize(
    ("launcher", "backend", "rank"),
    [
        ("mpirun", "horovod", 1),
        *[
            pytest.param(*where, rank, marks=pytest.mark.full)
            for where in LAUNCHERS
            for rank in (0, 1)
            if (*where, rank) != ("mpirun", "horovod", 1)
        ],
    ],
)
def test_a_rank_that_pauses_is_waited_for(
    launcher: str, backend: str, rank: int, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Stopped for half of the time: the job goes on as if nothing had been."""
    result = start(launcher, backend, "Faulty", tmp_path, fault=f"pause@{rank}")
    assert result.code == 0, result.text[-3000:]
    assert time.time() - float((tmp_path / "fault").read_text()) > 4.0, "else it tests nothing"
    assert messages(result) == []
    assert not (tmp_path / "run/failures").exists()
    mine = weights(tmp_path)
    assert [name for name in wanted if not torch.equal(mine[name], wanted[name])] == []


def test_after_rank_0_was_killed_the_same_command_goes_on(tmp_path: Path) -> None:
    """Though nobody gave the run directory back."""
    assert fails("--nproc", "horovod", "die@0", tmp_path)[0] == "0"
    result = start("--nproc", "horovod", "Faulty", tmp_path)
    assert result.code == 0, result.text[-3000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["restart"]) == ("finished", 1)


def test_work_without_a_bound_is_no_fault(tmp_path: Path) -> None:
    """Rank 0 prepares something for longer than --timeout, and the other waits."""
    result = start("--nproc", "ddp", "SlowToBuild", tmp_path)
    assert result.code == 0, result.text[-3000:]
    assert messages(result) == []


def test_an_exception_before_there_is_a_run_directory(tmp_path: Path) -> None:
    began = time.monotonic()
    result = start("--nproc", "ddp", "RaisesEarly", tmp_path)
    assert time.monotonic() - began < 30 + TIMEOUT + MORE
    assert result.code == 1
    said = f"hvd_ddp: rank 1 on {HOST} failed in building the model at step 0: RuntimeError: the sensor is on fire"
    assert messages(result) == [said], result.text[-3000:]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
@pytest.mark.parametrize("model", ["UnusedOnOneRank", "UnusedOnAll"])
def test_a_parameter_without_a_gradient_is_refused_by_name(backend: str, model: str, tmp_path: Path) -> None:
    result = start("--nproc", backend, model, tmp_path)
    assert result.code == 2, result.text[-3000:]
    assert result.err.count("got no gradient") == 1
    assert "`extra.weight, extra.bias`" in result.err
    assert "--find-unused-parameters" in result.err
    assert "Traceback" not in result.err
    assert not list((tmp_path / "run/checkpoints").glob("*.pt"))


def test_and_trains_the_same_with_find_unused_parameters(tmp_path: Path) -> None:
    states = []
    for backend in ("ddp", "horovod"):
        folder = tmp_path / backend
        folder.mkdir()
        result = start("--nproc", backend, "UnusedOnOneRank", folder, "--find-unused-parameters")
        assert result.code == 0, result.text[-3000:]
        states.append(weights(folder))
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


@pytest.mark.full
@pytest.mark.timeout(6000)
def test_no_false_alarm_in_a_hundred_runs_on_busy_cores() -> None:
    assert false_alarms.main(100) == 0
