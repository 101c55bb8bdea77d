"""A run that goes on elsewhere: the old one, cut off for a while, learns it before it writes anything."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import factories
import pytest
from launchers import ROOT, Result, run
from rundir import rows, summary
from test_stopping import OPTIONS, Job

from hvd_ddp.lock import Lock

ELSEWHERE = 'hostname elsewhere && exec "$@"'


def files(folder: Path) -> dict[str, bytes]:
    """All but logs, of which each start has its own."""
    found = [path for path in folder.rglob("*") if path.is_file() and "logs" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_a_requeued_job_takes_over_from_one_that_was_cut_off(tmp_path: Path) -> None:
    """Two ranks are stopped for some seconds; meanwhile Slurm starts the job again, on another host."""
    slurm = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "0"}
    folder = tmp_path / "run"
    old = Job("--nproc", "ddp", tmp_path, "--save-every", "3", "--timeout", "60", **slurm)
    old.wait_for(lambda: rows(folder, "save"))
    for rank in (0, 1):
        old.signal(rank, signal.SIGSTOP)
    program = [sys.executable, "-m", "hvd_ddp", "train", "--model", "factories:Slow", *OPTIONS, "--save-every", "3",
               "--run-dir", str(folder)]  # fmt: skip
    facts = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    result = run(["unshare", "-u", "sh", "-c", ELSEWHERE, "sh", *program], cwd=tmp_path, **facts)
    assert result.code == 0, result.text[-3000:]
    holder = {"host": "elsewhere", "pid": 4711, "job": "77", "restart": 1}
    (folder / "lock.json").write_text(json.dumps(holder))  # as if it were still there
    before = files(folder)
    for rank in (0, 1):
        old.signal(rank, signal.SIGCONT)
    left = old.end()
    assert left.code == 2, left.text[-3000:]
    said = f"hvd_ddp: `{folder}` has been taken over by process 4711 on elsewhere, job 77: this start"
    assert left.text.count(said) == 1, left.text[-3000:]
    assert "Traceback" not in left.text
    assert files(folder) == before
    assert (summary(folder)["status"], summary(folder)["restart"]) == ("finished", 1)


@pytest.mark.parametrize("finished", [False, True])
def test_nothing_is_written_into_the_run_of_another(
    finished: bool, cli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a checkpoint nor a line of metrics, nor that this start has failed; the other may be there or done."""
    folder = tmp_path / "run"
    before: dict[str, bytes] = {}

    def taken_over() -> None:
        while not rows(folder, "save"):
            time.sleep(0.002)
        lock = folder / "lock.json"
        lock.unlink()
        if not finished:
            lock.write_text(json.dumps({"host": "elsewhere", "pid": 4711, "job": None}))
            os.utime(lock, (1.0, 1.0))
        time.sleep(1.1)  # it was cut off for longer than that
        before.update(files(folder))

    monkeypatch.setattr("hvd_ddp.lock.BEAT", 0.1)
    monkeypatch.setitem(factories.Disturbed.at, 6, taken_over)
    options = ["--model", "factories:Disturbed", "--threads", "1", "--max-steps", "20", "--save-every", "4"]
    result = cli(*options, "--log-every", "1", "--run-dir", str(folder))
    assert result.code == 2, result.text
    words = "has lost its `lock.json`" if finished else "has been taken over by process 4711 on elsewhere"
    assert words in result.err
    assert files(folder) == before
    if not finished:
        assert (folder / "lock.json").stat().st_mtime == 1.0, "its heart beats for another"


def test_the_look_at_the_lock_is_cheap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small writes read it once a second at most."""
    from hvd_ddp.job.launch import Launch

    lock = Lock(tmp_path, Launch(), timeout=60)
    lock.acquire()
    reads: list[int] = []
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: reads.append(1) or read_text(path))
    began = time.time()
    for _ in range(1000):
        lock.check(now=False)
    assert len(reads) <= 1 + (time.time() - began)
