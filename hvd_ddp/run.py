"""The run directory: what is written into it, and what a person sees of the run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from hvd_ddp import checkpoint
from hvd_ddp.backends.base import Backend
from hvd_ddp.config import TrainConfig
from hvd_ddp.durable import replace_file
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.lock import Lock
from hvd_ddp.log import Console, Metrics, console, log_to, stop_logging
from hvd_ddp.resume import Start, default_directory, plan

log = logging.getLogger(__name__)


class Run:
    """An open run directory. Rank 0 writes all but the log file of each rank."""

    def __init__(self, config: TrainConfig, backend: Backend, *, total_steps: int, num_samples: int | None) -> None:
        """Decide what this start does, on rank 0, and tell all; raises HvdDDPError everywhere."""
        self.config, self.backend, self.total_steps = config, backend, total_steps
        self._data = b""
        with backend.meeting.pulse.long_work("reading the run directory"):
            self.start = Start(**backend.on_main(lambda: self._plan(num_samples)))
        self.directory = Path(self.start.directory)
        self.console: Console = console(is_main=backend.is_main, behind_mpi=backend.launch.mpi is not None)
        self.metrics = Metrics(self.directory / "metrics.jsonl" if backend.is_main else None)
        self._handler: logging.Handler | None = None
        self._began = time.monotonic()

    def _plan(self, num_samples: int | None) -> dict[str, Any]:
        directory = default_directory(self.config, self.backend.launch)
        self._lock = Lock(directory, self.backend.launch, timeout=self.config.timeout)
        self._lock.refuse_if_held()
        try:
            start, self._data = plan(self.config, directory, total_steps=self.total_steps, num_samples=num_samples)
        except OSError as error:
            raise HvdDDPError(f"`{directory}` can't be read: {error.strerror}. Choose another --run-dir.") from error
        return start.__dict__

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave the terminal as it was; after an exception also a line in this rank's log."""
        self.console.close()
        if error is not None and self._handler is not None:  # not into a directory that is not ours
            with contextlib.suppress(OSError):  # the first error counts
                log.error("failed", exc_info=error)

    def _write_failure(self, record: dict[str, Any]) -> bool:
        """Leave a record of the failure that ends the job; False if there is one of this start."""
        folder = self.directory / "failures" / str(self.start.restart)
        folder.mkdir(parents=True, exist_ok=True)
        mine = folder / f".{self.backend.launch.rank}"
        try:
            mine.write_text(json.dumps(record, indent=1) + "\n")
            os.link(mine, folder / ".first")  # there whole, or not at all; also on NFS
            os.rename(mine, folder / f"rank_{record['rank']:04d}.json")
        except FileExistsError:
            return False
        finally:
            mine.unlink(missing_ok=True)
        if not self.backend.is_main:  # it is rank 0 that can't
            self._write_summary("failed", {"steps": record["step"]})
        return True

    def _write_stacks(self, dump: Callable[..., None]) -> None:
        """What every thread of this rank is doing: the others of a rank that stands still may tell why."""
        folder = self.directory / "failures" / str(self.start.restart)
        with open(folder / f"rank_{self.backend.launch.rank:04d}.stacks", "w") as file:
            dump(file=file, all_threads=True)

    def _give_up(self) -> None:
        """Leave the directory as that of a failed run."""
        self._write_summary("failed", {"steps": self.backend.meeting.pulse.step})
        self._lock.release()

    def already_finished(self) -> None:
        """Say that there is nothing to do; nothing is written."""
        self.console.line(f"{self.directory} is already finished at step {self.total_steps}: nothing to do.")

    def open(self) -> None:
        """Take the directory, write what the run starts with, and say what was seen and chosen."""
        self.backend.on_main(self._open)
        meeting = self.backend.meeting
        meeting.write_record, meeting.write_stacks = self._write_failure, self._write_stacks
        if self.backend.is_main:
            meeting.farewells.append(self._give_up)
        for line in banner(self.config, self.backend, self.directory):
            self.console.line(line)
        folder = self.directory / "logs" / str(self.start.restart)
        self._handler = log_to(folder / f"rank_{self.backend.launch.rank:04d}.log")
        self.metrics.write(
            "start",
            restart=self.start.restart,
            **self._facts(),
            hosts=self.backend.launch.nodes,
            threads=torch.get_num_threads(),
            device=str(self.backend.device),
            torch=torch.__version__,
        )

    def _open(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "checkpoints").mkdir(exist_ok=True)
            self._lock.acquire()
            text = yaml.safe_dump(self.config.to_dict(), sort_keys=False)
            replace_file(self.directory / "config.yaml", text.encode())
            self._write_summary("running", {})
        except OSError as error:
            raise HvdDDPError(
                f"`{self.directory}` can't be written: {error.strerror}. Choose another --run-dir."
            ) from error

    def checkpoint_bytes(self) -> bytes:
        """The checkpoint to go on from, on every rank: rank 0 has read and verified it once."""
        return self.backend.broadcast_bytes(self._data if self.backend.is_main else None)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint (rank 0)."""
        if self.backend.is_main:
            path = checkpoint.save(self.directory / "checkpoints", step, state, keep=self.config.keep)
            self.metrics.write("save", step=step, file=path.name)

    def holds(self, path: str) -> bool:
        """Whether that checkpoint is one of this run."""
        return Path(path).parent == self.directory / "checkpoints"

    def close(self, status: str, results: dict[str, Any]) -> dict[str, Any]:
        """Write the summary and give the directory back; returns what the summary says of the training."""
        seconds = time.monotonic() - self._began
        self.metrics.write("end", status=status, seconds=seconds, **results)
        if self.backend.is_main:
            self.backend.meeting.farewells.remove(self._give_up)
            self._write_summary(status, {**results, "seconds": seconds})
            self._lock.release()
            self.console.line(
                f"{status}: {results['steps']} steps in {seconds:.1f} s, "
                + ", ".join(filter(None, [f"{results['samples_per_second']:.0f} samples/s", figures(results)]))
                + f"; {self.directory}"
            )
            if status == "preempted":
                self.console.line(f"to go on: {_command(self.directory)}")
        if self._handler is not None:
            stop_logging(self._handler)
        return {"status": status, **results}

    def trained(self, *, step: int, **row: Any) -> None:
        """Report an interval of training steps."""
        self.metrics.write("train", step=step, **row)
        text = "epoch {epoch}  loss {loss:.4f}  lr {lr:.2e}  {samples_per_second:.0f} samples/s".format(**row)
        self.console.progress(step, self.total_steps, text)
        log.info("step %d  %s", step, text)

    def evaluated(self, *, step: int, epoch: int, results: dict[str, float]) -> None:
        """Report an evaluation."""
        self.metrics.write("eval", step=step, epoch=epoch, **results)
        text = figures(results)
        self.console.line(f"evaluation at step {step}: {text}")
        log.info("evaluation at step %d: %s", step, text)

    def resumed(self, *, step: int, epoch: int) -> None:
        """Report where this start goes on, and what it passed over."""
        for reason in self.start.passed_over:
            self.console.line(f"passed over: {reason}")
        text = f"resuming from {self.start.checkpoint}, step {step} of {self.total_steps}"
        self.console.line(text)
        log.info(text)
        self.metrics.write("resume", step=step, epoch=epoch, file=self.start.checkpoint)

    def stopping(self, *, step: int) -> None:
        """Report that all ranks stop here."""
        order = self.backend.meeting.stop.order
        text = f"told to stop ({order.why if order else 'by another rank'}): all ranks stop after step {step}"
        self.console.line(text)
        log.info(text)
        self.metrics.write("preempt", step=step, why=order.why if order else None)

    def _facts(self) -> dict[str, Any]:
        backend, launch = self.backend, self.backend.launch
        return {
            "backend": backend.name,
            "transport": backend.transport,
            "launcher": launch.launcher,
            "world_size": launch.world_size,
            "global_batch": self.config.global_batch,
        }

    def _write_summary(self, status: str, results: dict[str, Any]) -> None:
        job = self.backend.launch.scheduler_job
        summary = {"status": status, "restart": self.start.restart, "job": job, **self._facts(), **results}
        replace_file(self.directory / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())


def _command(directory: Path) -> str:
    """What was typed, so that it goes on in this directory; under which launcher is the user's own choice."""
    arguments = sys.argv[1:]
    named = any(argument.split("=")[0] in ("--run-dir", "--run_dir") for argument in arguments)
    return shlex.join(["python", "-m", "hvd_ddp", *arguments, *([] if named else ["--run-dir", str(directory)])])


def figures(results: dict[str, float]) -> str:
    """An evaluation's results in words."""
    known = ("steps", "epochs", "samples_per_second", "num_samples")
    text = ", ".join(f"{name} {value:.4f}" for name, value in results.items() if name not in known)
    return text + (f" on {results['num_samples']} samples" if "num_samples" in results else "")


def banner(config: TrainConfig, backend: Backend, directory: Path) -> list[str]:
    """What was seen, what was chosen and why, in per-rank and global numbers."""
    launch = backend.launch
    share = f"{config.global_batch / launch.world_size:g} a rank"
    augment = f" (augment {config.augment})" if config.augment != "none" else ""
    cut = f", in {config.accumulate} micro-batches" if config.accumulate > 1 else ""
    return [
        f"launcher {launch.launcher} ({launch.seen}), {launch.world_size} rank(s) on {', '.join(launch.nodes[:8])}"
        + (f" and {len(launch.nodes) - 8} more" if len(launch.nodes) > 8 else ""),
        f"backend {backend.name} ({backend.why}), transport {backend.transport}, device {backend.device}, "
        f"{torch.get_num_threads()} thread(s) a rank",
        f"data {config.data}{augment}, model {config.model}, "
        f"{config.optimizer} at {config.lr:g}, {config.precision}; "
        f"global batch {config.global_batch}: {share}{cut}",
        f"run directory {directory}",
    ]
