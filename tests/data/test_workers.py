"""Loader workers: the same pieces as without, no trace of them afterwards, and a clear word when they fail."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import own_data
import psutil
import pytest
import torch
from launchers import ROOT, environment
from test_items import jittered, reader, request

from hvd_ddp.data.own import OwnItems
from hvd_ddp.data.workers import Here, Processes
from hvd_ddp.errors import HvdDDPError

HERE = Path(__file__).parent


@pytest.fixture
def workers():
    made = []

    def make(items, num=2, **options):
        made.append(Processes(reader(items, **options), num, size=1000, neighbours=1))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Pid(own_data.Items):
    """Whose process reads."""

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.tensor([float(os.getpid())]), 0


class Stuck(own_data.Items):
    """Leaves the number of its process in a file, and stays."""

    def __getitem__(self, index):
        if index:
            Path(self.items[0], str(os.getpid())).touch()
            time.sleep(600)
        return torch.zeros(1), 0

    def __len__(self):
        return 10


def test_pieces_are_those_that_the_rank_would_read(workers):
    there, here = workers(jittered(), 3), Here(reader(jittered()))
    wanted = [here.submit(request(*range(first, first + 10), epoch=first)) for first in range(0, 100, 10)]
    pieces = [there.submit(request(*range(first, first + 10), epoch=first)) for first in range(0, 100, 10)]
    for piece, want in zip(pieces, wanted, strict=True):
        assert torch.equal(piece.result().inputs, want.result().inputs)
        assert piece.result().samples.tolist() == want.result().samples.tolist()


def test_they_are_started_once_and_none_is_left(workers):
    own = workers(OwnItems("pid", Pid([0] * 100)), 3)
    pids = {int(own.submit(request(index)).result().inputs[0]) for index in range(3)}
    for _ in range(3):
        answers = [own.submit(request(index)) for index in range(30)]
        pids |= {int(answer.result().inputs[0]) for answer in answers}
    assert len(pids) <= 3 and os.getpid() not in pids
    own.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_signals_are_left_to_the_rank(workers):
    """From the first moment on: a job that is warned while it starts must not lose its workers."""
    own = workers(OwnItems("pid", Pid([0] * 100)))
    answer = own.submit(request(0))
    pids = [process.pid for process in own._processes]
    assert len(pids) == 2
    until = time.monotonic() + 4
    while time.monotonic() < until:
        for pid in pids:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
                os.kill(pid, number)
        time.sleep(0.05)
    answer.result()
    assert {int(own.submit(request(index)).result().inputs[0]) for index in range(4)} <= set(pids)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_they_die_with_the_rank(how, tmp_path):
    """Also those that are stuck in the user's code."""
    program = (
        "import os, sys, time\n"
        "from test_workers import Stuck, Processes, OwnItems, reader, request\n"
        f"own = Processes(reader(OwnItems('stuck', Stuck([{str(tmp_path)!r}]))), 2, size=1, neighbours=1)\n"
        "answers = [own.submit(request(1)), own.submit(request(2))]\n"
        f"while len(os.listdir({str(tmp_path)!r})) < 2: time.sleep(0.1)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
        "own.close()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}:{HERE}"),
    )  # fmt: skip
    try:
        assert process.stdout.readline() == b"ready\n"
        pids = [int(name) for name in os.listdir(tmp_path)]
        assert all(psutil.pid_exists(pid) for pid in pids)
        if how == "killed":
            process.kill()
        else:
            process.stdin.close()
            assert process.wait(20) == 0
        until = time.monotonic() + 5
        while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < until:
            time.sleep(0.05)
        assert not [pid for pid in pids if psutil.pid_exists(pid)]
    finally:
        process.kill()
        process.wait()


def test_a_dead_worker_is_told(workers):
    own = workers(OwnItems("pid", Pid([0] * 100)))
    pid = int(own.submit(request(0)).result().inputs[0])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(HvdDDPError, match=r"loader worker ended with signal 9"):
        for index in range(50):
            own.submit(request(index)).result()


def test_what_a_data_set_raises_comes_through(workers):
    own = workers(OwnItems("faulty", own_data.faulty(None)[0]))
    with pytest.raises(OSError, match="no sample 3") as caught:
        own.submit(request(3)).result()
    assert "in __getitem__" in str(caught.value.__cause__)
    assert own.submit(request(4)).result().samples.tolist() == [4]


def test_what_cannot_be_sent_is_told():
    local = OwnItems("local", own_data.local(None)[0])
    with pytest.raises(HvdDDPError, match=r"`local` can't be sent to loader workers: `.*Local.*--workers 0"):
        Processes(reader(local), 2, size=1, neighbours=1)


class Foreign(own_data.Items):
    def __setstate__(self, state):
        raise ImportError("no module of that name")


def test_what_cannot_be_taken_up_is_told(workers):
    own = workers(OwnItems("foreign", Foreign([(torch.zeros(1), 0)])))
    with pytest.raises(HvdDDPError, match=r"can't take up the data: `ImportError\('no module of that name'\)`"):
        own.submit(request(0)).result()


def test_too_little_shared_memory(tmp_path):
    """A /dev/shm of 1 MB, in name spaces of its own."""
    program = (
        "from test_workers import Processes, jittered, reader\n"
        "Processes(reader(jittered()), 2, size=300_000, neighbours=2)\n"
    )
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh", sys.executable,
         "-c", program],
        env=environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}:{HERE}"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "`/dev/shm` has `1` MB free, and 2 loader workers for each of 2 ranks here can hold `4` MB" in result.stderr


def test_too_few_descriptors():
    program = (
        "from test_workers import Processes, jittered, reader\nProcesses(reader(jittered()), 2, size=1, neighbours=1)\n"
    )
    result = subprocess.run(
        ["sh", "-c", 'ulimit -n 40; exec "$@"', "sh", sys.executable, "-c", program],
        env=environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}:{HERE}"), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "This process may have `40` files open, and 2 loader workers need" in result.stderr, result.stderr


def test_a_soft_limit_of_descriptors_is_raised():
    program = (
        "import resource\nfrom test_workers import Processes, jittered, reader, request\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (50, 4096))\n"
        "own = Processes(reader(jittered()), 2, size=1, neighbours=1)\n"
        "answers = [own.submit(request(index)) for index in range(60)]\n"
        "kept = [answer.result() for answer in answers[:4]]\nown.close()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 50)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", f"if __name__ == '__main__':\n  exec({program!r})"],
        env=environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}:{HERE}"), capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert result.stdout == "True\n", result.stderr


def test_they_import_neither_mpi_nor_horovod(workers):
    own = workers(OwnItems("modules", Modules([0] * 4)), 1)
    assert own.submit(request(1)).result().inputs.tolist() == [[0.0]]


class Modules(own_data.Items):
    def __getitem__(self, index):
        return torch.tensor([float(any(name in sys.modules for name in ("mpi4py", "horovod")))]), 0
