"""One job at a time in a run directory, and dead ones do not count."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch
from hvd_ddp.lock import Lock
from hvd_ddp.log import Metrics


def lock(folder: Path, **launch: object) -> Lock:
    return Lock(folder, Launch(**launch), timeout=60)


def holder(folder: Path, **changes: object) -> dict:
    mine = lock(folder).holder
    return {**mine, **changes}


def test_a_second_job_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        created = psutil.Process(sleeper.pid).create_time()
        text = json.dumps(holder(tmp_path, pid=sleeper.pid, created=created, job="17"))
        (tmp_path / "lock.json").write_text(text)
        with pytest.raises(HvdDDPError, match=rf"in use by process {sleeper.pid} on .*, job 17"):
            lock(tmp_path).acquire()
        assert (tmp_path / "lock.json").read_text() == text
        assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]
    finally:
        sleeper.kill()
        sleeper.wait()
    lock(tmp_path).acquire()  # now it is dead


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        ({"created": 1.0}, False),  # another process has the number now
        ({"host": "elsewhere"}, True),
        ({"host": "elsewhere", "job": "5", "restart": 0}, False),  # an earlier start of this job
        ({"host": "elsewhere", "job": "5", "restart": 2}, True),
        ({"host": "elsewhere", "job": "6", "restart": 0}, True),
        ({"pid": "nonsense"}, False),
    ],
)
def test_who_counts_as_alive(changes: dict, alive: bool, tmp_path: Path) -> None:
    parent = os.getppid()
    text = json.dumps(holder(tmp_path, pid=parent, created=psutil.Process(parent).create_time()) | changes)
    (tmp_path / "lock.json").write_text(text)
    mine = lock(tmp_path, scheduler_job="5", scheduler_restart=1)
    if alive:
        with pytest.raises(HvdDDPError):
            mine.acquire()
    else:
        mine.acquire()
        assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()


def test_a_holder_elsewhere_that_stood_still_is_dead(tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text(json.dumps(holder(tmp_path, host="elsewhere")))
    old = time.time() - 61
    os.utime(tmp_path / "lock.json", (old, old))
    lock(tmp_path).acquire()


@pytest.mark.parametrize("fast", [-3600, 3600])
def test_the_clock_of_the_file_system_counts(fast: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of this host may be an hour fast or slow: who lives is not taken for dead, nor the other way round."""
    (tmp_path / "lock.json").write_text(json.dumps(holder(tmp_path, host="elsewhere")))
    now = time.time() + fast
    monkeypatch.setattr(time, "time", lambda: now)
    with pytest.raises(HvdDDPError, match="in use by"):
        lock(tmp_path).acquire()
    old = time.time() - fast - 61
    os.utime(tmp_path / "lock.json", (old, old))
    lock(tmp_path).acquire()


def test_a_broken_lock_file_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "lock.json").write_text('{"host": "ha')
    lock(tmp_path).acquire()
    assert json.loads((tmp_path / "lock.json").read_text())["pid"] == os.getpid()


def test_one_of_many_wins(tmp_path: Path) -> None:
    """Eight processes at once over the lock of a dead one: one gets it."""
    (tmp_path / "lock.json").write_text(json.dumps(holder(tmp_path, created=1.0)))
    code = (
        "import sys, time, pathlib\n"
        "from hvd_ddp.job.launch import Launch\n"
        "from hvd_ddp.lock import Lock\n"
        "from hvd_ddp.errors import HvdDDPError\n"
        "lock = Lock(pathlib.Path(sys.argv[1]), Launch(), timeout=60)\n"
        "while time.time() < float(sys.argv[2]): pass\n"
        "try:\n    lock.acquire(); print('mine', flush=True); time.sleep(3)\n"
        "except HvdDDPError: print('refused')\n"
    )
    begin = str(time.time() + 3)
    tries = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), begin], stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    said = [process.communicate(timeout=60)[0].strip() for process in tries]
    assert sorted(said) == ["mine"] + ["refused"] * 7


def test_released(tmp_path: Path) -> None:
    mine = lock(tmp_path)
    mine.acquire()
    mine.release()
    assert list(tmp_path.iterdir()) == []
    assert "lock" not in {thread.name for thread in threading.enumerate() if thread.is_alive() and not thread.daemon}


@pytest.mark.parametrize("how", ["taken over", "released by the other", "broken"])
def test_who_was_taken_for_dead_learns_it(how: str, tmp_path: Path) -> None:
    """And leaves the other one's lock alone."""
    mine = lock(tmp_path)
    mine.acquire()
    mine.check()
    mine.check(now=False)
    other = json.dumps(holder(tmp_path, host="elsewhere", pid=4711, job="9"))
    (tmp_path / "summary.json").touch()
    (tmp_path / "lock.json").unlink()
    if how != "released by the other":
        (tmp_path / "lock.json").write_text(other if how == "taken over" else other[:20])
    words = "taken over by process 4711 on elsewhere, job 9" if how == "taken over" else "has lost its `lock.json`"
    mine.check(now=False)  # within a second one look is enough
    with pytest.raises(HvdDDPError, match=words):
        mine.check()
    mine._looked -= 1.1
    with pytest.raises(HvdDDPError, match=words):
        mine.check(now=False)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    os.utime(mine._file)  # as its beat does
    mine.release()
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before


def test_a_directory_that_is_gone_is_nobodys_fault(tmp_path: Path) -> None:
    """Its disk may come back: that is an error of this write, not the end."""
    folder = tmp_path / "run"
    folder.mkdir()
    mine = lock(folder)
    mine.acquire()
    (folder / "lock.json").rename(tmp_path / "aside")
    with pytest.raises(OSError, match="No such file"):
        mine.check()
    folder.rmdir()
    with pytest.raises(OSError, match="No such file"):
        mine.check()
    folder.mkdir()
    (tmp_path / "aside").rename(folder / "lock.json")
    mine.check()


def test_a_container_on_this_host_has_process_numbers_of_its_own(tmp_path: Path) -> None:
    """That there is no such process here says nothing."""
    text = json.dumps(holder(tmp_path, processes=1, pid=4_000_000, created=1.0))
    (tmp_path / "lock.json").write_text(text)
    with pytest.raises(HvdDDPError, match="in use by process 4000000"):
        lock(tmp_path).acquire()


def test_leftovers_of_those_killed_while_they_took_it(tmp_path: Path) -> None:
    old, new = tmp_path / "lock.aa.tmp", tmp_path / "lock.bb.tmp"
    for path in (old, new):
        path.touch()
    os.utime(old, (1.0, 1.0))
    lock(tmp_path).acquire()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock.bb.tmp", "lock.json"]


def test_metrics_wait_for_the_disk(tmp_path: Path) -> None:
    """None is lost, none is there twice, and it is said once."""
    path, said, works = tmp_path / "metrics.jsonl", [], [True]

    def guard() -> None:
        if not works[0]:
            raise OSError(28, "No space left on device")

    metrics = Metrics(path, guard=guard, complain=said.append)
    for step, works[0] in enumerate([True, False, False, True, True, False]):
        metrics.write("train", step=step)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3, 4]
    assert len(said) == 2
    assert metrics.num_waiting == 1


def test_metrics_after_a_kill_within_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tr')
    metrics = Metrics(path)
    metrics.write("start", loss=float("nan"))
    metrics.write("end")
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert [json.loads(line) for line in lines[2:]] == [{"kind": "start", "loss": None}, {"kind": "end"}]
