"""Run directories: what anybody may have left there, before a start and in the middle of a run."""

import contextlib
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import matplotlib.font_manager  # noqa: F401  here, not within an example: it writes a list of fonts for the user
import torch
from hypothesis import strategies as st

from fuzz.guard import fuzz
from fuzz.mutations import changed, json_files, put, spoilt, strange
from fuzz.test_options import SEEDS, SHORT, as_yaml
from hvd_ddp import history
from hvd_ddp.backends.local import LocalBackend
from hvd_ddp.commands.plot import picture
from hvd_ddp.config import TrainConfig
from hvd_ddp.job.launch import Launch
from hvd_ddp.job.rendezvous import meet
from hvd_ddp.lock import Lock
from hvd_ddp.run import Run

SUMMARY = {"status": "running", "restart": 3, "job": "42", "steps": 7, "loss": 0.5, "world_size": 2}
LAUNCH = Launch(launcher="single", rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, job="single",
                cores=1, scheduler="slurm", scheduler_job="42", scheduler_restart=1)  # fmt: skip
HOLDER = Lock(Path("."), LAUNCH, timeout=1.0).holder
ELSEWHERE = HOLDER | {"host": "elsewhere", "restart": 0}
LINES = b'{"kind": "start", "restart": 0}\n{"kind": "train", "step": 1, "loss": 2.5}\n'


@functools.cache
def backend() -> LocalBackend:
    meeting = meet(LAUNCH, directory=Path("."), start_timeout=5.0)
    return LocalBackend(meeting, transport="none", device=torch.device("cpu"), timeout=5.0)


files = st.fixed_dictionaries(
    {},
    optional={
        "summary.json": st.one_of(json_files(SUMMARY), json_files(SUMMARY | {"restart": 10**30}), strange),
        "lock.json": st.one_of(json_files(HOLDER), json_files(HOLDER | {"pid": 2**40}), json_files(ELSEWHERE), strange),
        "metrics.jsonl": st.one_of(spoilt(LINES), strange),
        "config.yaml": st.one_of(
            st.sampled_from(SEEDS), changed(SHORT).map(as_yaml), spoilt(as_yaml(TrainConfig().to_dict())), strange
        ),
        "checkpoints": strange,
        "failures": strange,
        "logs": strange,
        f"config.yaml.{os.getpid()}.tmp": strange,
        "x.y.tmp": strange,
        "lock.0.tmp": strange,
    },
)
ONE_EACH = [{name: what} for name, what in [
    ("summary.json", b"[" * 100_000), ("summary.json", b'{"restart": 1e999}'), ("summary.json", b'{"restart": -5}'),
    ("lock.json", b"[" * 100_000), ("lock.json", b"[1]"), ("config.yaml", b"data: 2001-99-99"),
    ("config.yaml", b"data: \xff"), ("config.yaml", b"data:\n" + b"- " * 3000),
]]  # fmt: skip


def start(directory: Path) -> None:
    """All that a run does with its directory, but for the training."""
    config = TrainConfig(run_dir=directory, max_steps=10, timeout=0.1)
    with Run(config, backend(), total_steps=10, num_samples=100) as run:
        if run.start.finished:
            return
        assert isinstance(run.start.restart, int)
        run.open()
        try:
            run.trained(step=1, epoch=0, loss=1.0, lr=0.1, samples_per_second=1.0)
            run.save(1, {"model": {"w": torch.ones(3)}, "decisions": {}})
            with contextlib.suppress(OSError):  # nobody waits for it, nor minds
                run._write_failure({"rank": 0, "step": 1})
            with contextlib.suppress(OSError):
                run._write_stacks(lambda file, all_threads: file.write("x"))
            run.finish_saving()
        finally:
            backend().meeting.farewells.clear()
            run._lock.release()


@fuzz(50, ONE_EACH, files=files)
def test_start(folder: Path, files: dict[str, Any]) -> None:
    directory = folder / "inside" / "run"
    directory.mkdir()
    for name, what in files.items():
        put(directory / name, what, folder)
    start(directory)


inner = st.fixed_dictionaries(
    {},
    optional={
        name: strange
        for name in ("failures/0/.0", "failures/0/.first", "failures/0/rank_0000.json", "failures/0/rank_0000.stacks",
                     "logs/0/rank_0000.log", "checkpoints/step_00000001.pt", "checkpoints/step_00000001.pt.sha256",
                     "checkpoints/a.b.tmp", f"checkpoints/step_00000001.pt.{os.getpid()}.tmp",
                     "checkpoints/step_٣٣٣٣٣٣٣٣.pt")
    },
)  # fmt: skip


@fuzz(30, files=inner)
def test_start_over_what_is_inside(folder: Path, files: dict[str, Any]) -> None:
    directory = folder / "inside" / "run"
    for name, what in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        put(directory / name, what, folder)
    start(directory)


@fuzz(30, what=st.one_of(json_files(HOLDER), json_files(ELSEWHERE), strange))
def test_the_lock_is_spoilt_meanwhile(folder: Path, what: Any) -> None:
    directory = folder / "inside"
    lock = Lock(directory, LAUNCH, timeout=0.1)
    lock.acquire()
    try:
        (directory / "lock.json").unlink()
        put(directory / "lock.json", what, folder)
        os.utime(directory, (time.time(),) * 2)
        with contextlib.suppress(OSError):  # of a disk that is gone: training goes on, the writer does not
            lock.check()
    finally:
        lock.release()


@fuzz(20, name=st.one_of(st.sampled_from(["../x", "/tmp/x", "x" * 300, "~", ".", "..", "a\nb"]), st.text(max_size=9)))
def test_names_of_the_directory(folder: Path, name: str) -> None:
    """The name is the user's: it may be anywhere below the working directory that it can be, and no traceback."""
    if "\0" not in name and not name.startswith("/") and ".." not in name:
        start(Path(name or "x"))


ROWS: list[dict[str, Any]] = [
    {"kind": "start", "backend": "ddp", "world_size": 2, "restart": 0},
    {"kind": "train", "step": 1, "epoch": 0, "loss": 2.5, "lr": 0.1, "samples_per_second": 9.0},
    {"kind": "eval", "step": 2, "epoch": 1, "loss": 2.0, "accuracy": 0.5, "num_samples": 9},
    {"kind": "resume", "step": 1},
    {"kind": "train", "step": 4, "epoch": 1, "loss": None, "lr": 0.1, "samples_per_second": 9.0},
    {"kind": "end", "steps": 4, "epochs": 2, "status": "finished"},
]


def as_lines(rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows) if isinstance(rows, list) else b"1"


@fuzz(
    6,
    [
        as_lines(ROWS),
        as_lines(ROWS) + b"[" * 100_000,
        as_lines([*ROWS, {"kind": "end", "steps": 10**400, "epochs": 1}]),
    ],
    lines=st.one_of(changed(ROWS).map(as_lines), spoilt(as_lines(ROWS)), strange),
    options=st.one_of(st.sampled_from(SEEDS), strange),
)
def test_plot(folder: Path, lines: Any, options: Any) -> None:
    directory = folder / "inside" / "run"
    directory.mkdir()
    put(directory / "metrics.jsonl", lines, folder)
    put(directory / "config.yaml", options, folder)
    found = history.read(directory)
    assert all(isinstance(name, str) for name in history.names([found, found]))
    picture([found], "png")
