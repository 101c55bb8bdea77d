"""launch --on ray, on a real Ray that runs already, in another folder; and on one that it starts itself."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from launchers import ROOT, Result, assert_none_left, environment, processes, run, train
from rundir import different, last_step, newest, summary, tensors

Cli = Callable[..., Result]
TRAINING = ["--threads", "1", "--max-steps", "12", "--global-batch", "50", "--clip-norm", "0.5", "--optimizer", "adamw",
            "--weight-decay", "0.1", "--accumulate", "2", "--save-every", "5"]  # fmt: skip
LONG = ["--threads", "1", "--max-steps", "400", "--model", "factories:Slow", "--log-every", "1", "--timeout", "8"]
PATHS = f"{ROOT}:{ROOT / 'tests'}"


@pytest.fixture(scope="module")
def private() -> Iterator[dict[str, str]]:
    """A folder with a short name for Ray's sockets, whose paths may have 107 letters; a token that is not ~/.ray's."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    token = folder / "token"
    token.write_text("0" * 64)
    try:
        yield {
            "RAY_TMPDIR": str(folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def ray(private: dict[str, str]) -> Iterator[dict[str, str]]:
    """What a program needs in its environment to find a Ray of two CPUs."""
    folder = Path(private["RAY_TMPDIR"]) / "head"
    folder.mkdir()
    options = ["--num-cpus=2", "--num-gpus=0", "--port=0", f"--temp-dir={folder}", "--include-dashboard=false",
               "--object-store-memory=80000000", "--disable-usage-stats"]  # fmt: skip
    with (folder / "start.log").open("wb") as log:
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options],
            cwd=folder, env=environment(FORWARD="0.05", **private), stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    known = folder / "ray_current_cluster"
    try:
        until = time.monotonic() + 90
        while not known.exists() or not known.read_text().strip():
            assert head.poll() is None and time.monotonic() < until, (folder / "start.log").read_text()
            time.sleep(0.1)
        yield {**private, "RAY_ADDRESS": known.read_text().strip()}
    finally:
        started = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        _, left = psutil.wait_procs([*started, psutil.Process(head.pid)], timeout=10)
        for process in left:
            process.kill()


def words(*training: str, num_ranks: int = 2) -> list[str]:
    return [sys.executable, "-m", "hvd_ddp", "launch", "--on", "ray", "-n", str(num_ranks), *training]


def launch(ray: dict[str, str], folder: Path, *training: str, num_ranks: int = 2) -> Result:
    return run(words(*training, num_ranks=num_ranks), cwd=folder, timeout=150, PYTHONPATH=PATHS, **ray)


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_it_ends_with_the_weights_of_torchrun(backend: str, ray: dict[str, str], tmp_path: Path) -> None:
    options = [*TRAINING, "--backend", backend, "--run-dir"]
    assert train("torchrun", 2, *options, "torchrun", cwd=tmp_path).code == 0
    result = launch(ray, tmp_path, *options, "ray")
    assert result.code == 0, result.text[-4000:]
    assert different(tensors(newest(tmp_path / "ray")), tensors(newest(tmp_path / "torchrun"))) == []
    assert "launcher ray (HVD_DDP_RAY_RANK=0 HVD_DDP_RAY_SIZE=2), 2 rank(s)" in result.out
    said = summary(tmp_path / "ray")
    assert (said["backend"], said["transport"], said["launcher"], said["world_size"]) == (backend, "gloo", "ray", 2)
    assert result.err == "" and result.out.count("finished: ") == 1
    assert_none_left(str(tmp_path))


class Job:
    """A long training in the background."""

    def __init__(self, ray: dict[str, str], folder: Path) -> None:
        self.run = folder / "run"
        self.process = subprocess.Popen(
            words(*LONG, "--run-dir", str(self.run)), cwd=folder,
            env=environment(PYTHONPATH=PATHS, **ray), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        until = time.monotonic() + 100
        while last_step(self.run) < 3:
            assert self.process.poll() is None and time.monotonic() < until, self.process.communicate()
            time.sleep(0.05)

    def rank(self, number: int) -> int:
        """Its process."""
        found = processes(str(self.run)).items()
        (pid,) = [pid for pid, launch in found if launch.launcher == "ray" and launch.rank == number]
        return pid

    def ends(self) -> Result:
        try:
            out, err = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        assert_none_left(str(self.run))
        return Result(self.process.returncode, out, err)


def test_a_rank_that_dies_ends_the_job_and_is_named(ray: dict[str, str], tmp_path: Path) -> None:
    job = Job(ray, tmp_path)
    os.kill(job.rank(1), signal.SIGKILL)
    result = job.ends()
    assert result.code == 1
    (said,) = [line for line in result.err.splitlines() if line]
    assert re.fullmatch(rf"hvd_ddp: rank 1 on {socket.gethostname()} last seen in .* gone without a word.*", said)


@pytest.mark.full
def test_a_rank_dies_with_its_actor(ray: dict[str, str], tmp_path: Path) -> None:
    """As when Ray's memory monitor kills a worker."""
    job = Job(ray, tmp_path)
    actor = psutil.Process(job.rank(1)).parent()
    assert actor is not None and "ray::" in actor.name() + " ".join(actor.cmdline())
    actor.kill()
    result = job.ends()
    assert result.code == 1
    assert f"hvd_ddp: rank 1 on {socket.gethostname()} is gone: its Ray actor died" in result.err
    assert "gone without a word" in result.err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 75, marks=pytest.mark.full)]
)
def test_signals_go_to_all_ranks(number: int, code: int, ray: dict[str, str], tmp_path: Path) -> None:
    job = Job(ray, tmp_path)
    job.process.send_signal(number)
    result = job.ends()
    assert result.code == code, result.text
    assert newest(job.run)["progress"]["step"] == last_step(job.run) < 400
    assert summary(job.run)["status"] == "preempted"


@pytest.mark.full
def test_the_launcher_is_killed(ray: dict[str, str], tmp_path: Path) -> None:
    """Its ranks go with it."""
    job = Job(ray, tmp_path)
    job.process.kill()
    job.process.communicate()
    assert_none_left(str(job.run), within=15)


@pytest.mark.full
def test_what_the_ranks_refuse_is_said_once(ray: dict[str, str], tmp_path: Path) -> None:
    result = launch(ray, tmp_path, "--global-batch", "5000")
    assert result.code == 2 and result.err.count("--global-batch is `5000`") == 1 and "Traceback" not in result.text


def test_no_room(ray: dict[str, str], tmp_path: Path) -> None:
    result = launch(ray, tmp_path, "--start-timeout", "2", num_ranks=3)
    assert result.code == 2
    assert "-n is `3`, and Ray had no room for so many ranks of one CPU" in result.err and "it has `2`" in result.err
    assert not list(tmp_path.iterdir())


def test_no_such_cluster(private: dict[str, str], tmp_path: Path) -> None:
    result = launch({**private, "RAY_ADDRESS": "nowhere.invalid"}, tmp_path)
    assert result.code == 2 and "Ray's cluster can't be joined" in result.err and "Traceback" not in result.text


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["-n", "0"], "-n is `0`"),
        (["-n", "2", "--epochs", "0"], "--epochs is `0`"),
        (["-n", "2", "--nproc", "2"], "--nproc is `2`, and launch starts the ranks itself"),
        (["-n", "2", "--no-such-option"], "--no-such-option"),
        ([], "-n"),
    ],
)
def test_bad_input(arguments: list[str], wanted: str, cli: Cli) -> None:
    """Refused before Ray is asked for anything."""
    result = cli("launch", "--on", "ray", *arguments)
    assert result.code == 2 and wanted in result.err and "Traceback" not in result.err, result.text
    assert "ray" not in sys.modules


def test_a_cluster_of_its_own(private: dict[str, str], tmp_path: Path) -> None:
    """Where none runs: as the README has it."""
    folder = Path(private["RAY_TMPDIR"]) / "own"
    folder.mkdir()
    result = run(words("--max-steps", "2"), cwd=tmp_path, timeout=150, **{**private, "RAY_TMPDIR": str(folder)})
    assert result.code == 0 and result.out.count("finished: 2 steps") == 1, result.text[-3000:]
    assert list(folder.rglob("session_*")), "else it took another"
    assert_none_left(str(folder), within=15)
