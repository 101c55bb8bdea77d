"""The run directory: what is written into it, and what a person sees of the run."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from hvd_ddp.backends.base import Backend
from hvd_ddp.banner import banner, command_to_go_on, ending, figures, interval
from hvd_ddp.config import TrainConfig
from hvd_ddp.durable import open_own, overwrite, remove_temporaries, replace_file
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.lock import Lock
from hvd_ddp.log import Console, Metrics, console, log_to, stop_logging
from hvd_ddp.resume import Start, default_directory, plan, same_directory
from hvd_ddp.saving import Saved, Saver
from hvd_ddp.trackers import About, Trackers

log = logging.getLogger(__name__)
SETTLE = 2.0  # seconds that a job which fails gives to the checkpoint that is being written


class Run:
    """An open run directory. Rank 0 writes all but the log file of each rank."""

    def __init__(self, config: TrainConfig, backend: Backend, *, total_steps: int, num_samples: int | None) -> None:
        """Decide what this start does, on rank 0, and tell all; raises HvdDDPError everywhere."""
        self.config, self.backend, self.total_steps = config, backend, total_steps
        self._data, self._given_up = b"", False
        self._trackers = Trackers()
        self._evaluated: dict[str, float] = {}  # by the last evaluation of this start
        directory = default_directory(config, backend.launch)
        with backend.meeting.pulse.long_work("reading the run directory"):
            same_directory(directory, backend)
            self.start = Start(**backend.on_main(lambda: self._plan(directory, num_samples)))
        self.directory = Path(self.start.directory)
        self._lock = Lock(self.directory, backend.launch, timeout=config.timeout)
        self.console: Console = console(is_main=backend.is_main, behind_mpi=backend.launch.mpi is not None)
        self.metrics = Metrics(
            self.directory / "metrics.jsonl" if backend.is_main else None,
            guard=lambda: self._guard(now=False),
            complain=self._metrics_wait,
        )
        self._saver = Saver(
            self.directory / "checkpoints",
            keep=config.keep,
            guard=self._guard,
            saved=self._saved,
            failed=self._not_saved,
        )
        self._handler: logging.Handler | None = None
        self._began = time.monotonic()

    def _plan(self, directory: Path, num_samples: int | None) -> dict[str, Any]:
        Lock(directory, self.backend.launch, timeout=self.config.timeout).refuse_if_held()
        with self.backend.meeting.pulse.long_work("importing trackers"):
            self._trackers = Trackers(self.config.track, warn=self._warn)
        try:
            start, self._data = plan(self.config, directory, total_steps=self.total_steps, num_samples=num_samples)
        except OSError as error:
            raise HvdDDPError(f"`{directory}` can't be read: {error.strerror}. Choose another --run-dir.") from error
        return start.__dict__

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave the terminal as it was; after an exception also a line in this rank's log."""
        self._saver.settle(SETTLE)
        self.console.close()
        if self._handler is not None:  # else the directory is not ours
            if error is not None:
                log.error("failed", exc_info=error)
            stop_logging(self._handler)

    def _write_failure(self, record: dict[str, Any]) -> bool:
        """Leave a record of the failure that ends the job; False if there is one of this start."""
        self._lock.check()
        folder = self.directory / "failures" / str(self.start.restart)
        folder.mkdir(parents=True, exist_ok=True)
        mine = folder / f".{self.backend.launch.rank}"
        try:
            with open(open_own(mine, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
                file.write(json.dumps(record, indent=1) + "\n")
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
        path = folder / f"rank_{self.backend.launch.rank:04d}.stacks"
        with open(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            dump(file=file, all_threads=True)

    def _give_up(self) -> None:
        """Leave the directory as that of a failed run."""
        self._saver.settle(SETTLE)
        self._given_up = True
        try:
            self._trackers.close("failed", SETTLE)
            self._write_summary("failed", {"steps": self.backend.meeting.pulse.step})
        finally:
            self._lock.release()

    def already_finished(self) -> None:
        """Say that there is nothing to do; nothing is written."""
        self.console.line(f"{self.directory} is already finished ({self.start.checkpoint}): nothing to do.")

    def open(self) -> None:
        """Take the directory, write what the run starts with, and say what was seen and chosen."""
        self._lock.holder = self.backend.on_main(self._open)
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
        config = {**self.config.to_dict(), **self._facts()}
        self._trackers.open(About(self.directory, self.start.restart, meeting.pulse.step, config))

    def _open(self) -> dict[str, Any]:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "checkpoints").mkdir(exist_ok=True)
            holder = self._lock.acquire()
            for folder in (self.directory, self.directory / "checkpoints"):
                remove_temporaries(folder)
            text = yaml.safe_dump(self.config.to_dict(), sort_keys=False)
            replace_file(self.directory / "config.yaml", text.encode())
            replace_file(self.directory / "summary.json", self._summary("running", {}))
            return holder
        except OSError as error:
            self._lock.release()
            raise HvdDDPError(
                f"`{self.directory}` can't be written: {error.strerror}. Choose another --run-dir."
            ) from error

    def checkpoint_bytes(self) -> bytes:
        """The checkpoint to go on from, on every rank: rank 0 has read and verified it once."""
        return self.backend.broadcast_bytes(self._data if self.backend.is_main else None)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin to write a checkpoint (rank 0), after the one before; see `hvd_ddp.saving`."""
        if self.backend.is_main:
            self._saver.save(step, state)

    def finish_saving(self) -> None:
        """All ranks wait until the last checkpoint is on the disk; HvdDDPError on all if it can't be."""
        pulse = self.backend.meeting.pulse
        pulse.at("meeting the others")

        def finish() -> None:
            with pulse.long_work("saving"):
                self._saver.finish()

        self.backend.on_main(finish)

    def _saved(self, saved: Saved) -> None:
        facts = {"file": saved.path.name, "seconds": saved.seconds, "stood": saved.stood}
        self.metrics.write("save", step=saved.step, **facts)
        log.info("saved %s in %.2f s, of which training stood still %.3f s", *facts.values())

    def _not_saved(self, step: int, error: OSError) -> None:
        self._warn(f"the checkpoint of step {step} can't be written: {error.strerror}. The next save tries again")
        self.metrics.write("warning", step=step, what="not saved", error=error.strerror)

    def _metrics_wait(self, error: OSError) -> None:
        self._warn(f"metrics.jsonl can't be written: {error.strerror}. Its lines wait in memory")

    def _warn(self, text: str) -> None:
        if not self._given_up:
            self.console.line(f"warning: {text}; training goes on.")
            log.warning(text)

    def _guard(self, *, now: bool = True) -> None:
        """Before every write of rank 0: HvdDDPError if the directory is another job's by now."""
        if self._given_up:
            raise OSError(errno.ECANCELED, "this job has ended")
        self._lock.check(now=now)

    @property
    def trace(self) -> Path | None:
        """Where --profile puts what this rank did."""
        rank = f"rank_{self.backend.launch.rank:04d}.json"
        return self.directory / "profile" / str(self.start.restart) / rank if self.config.profile else None

    def holds(self, path: str) -> bool:
        """Whether that checkpoint is one of this run."""
        return Path(path).parent == self.directory / "checkpoints"

    def close(self, status: str, results: dict[str, Any]) -> dict[str, Any]:
        """Write the summary and give the directory back; returns what the summary says of the training."""
        results = {**results, "seconds": time.monotonic() - self._began}
        self.metrics.write("end", status=status, **results)
        if self.backend.is_main:
            with self.backend.meeting.pulse.long_work("closing trackers"):
                self._trackers.close(status)
            self.backend.meeting.farewells.remove(self._give_up)
            self._close(status, results)
            for line in ending(status, results, self.backend.launch.world_size, self.directory):
                self.console.line(line)
            if status == "preempted":
                self.console.line(f"to go on: {command_to_go_on(self.directory)}")
        return {"status": status, **results}

    def _close(self, status: str, results: dict[str, Any]) -> None:
        try:
            self._write_summary(status, results)
        except OSError as error:
            self.console.line(f"warning: summary.json can't be written: {error.strerror}. It does not say `{status}`.")
        if self.metrics.num_waiting:
            self.console.line(f"warning: {self.metrics.num_waiting} lines of metrics.jsonl could not be written: lost.")
        self._lock.release()

    def trained(self, *, step: int, **row: Any) -> None:
        """Report an interval of training steps."""
        self.metrics.write("train", step=step, **row)
        self._trackers.row("train", step, row)
        text = interval(row, self._evaluated)
        self.console.progress(step, self.total_steps, text)
        log.info("step %d  %s", step, text)

    def evaluated(self, *, step: int, epoch: int, results: dict[str, float]) -> None:
        """Report an evaluation."""
        self.metrics.write("eval", step=step, epoch=epoch, **results)
        self._trackers.row("eval", step, {"epoch": epoch, **results})
        self._evaluated = results
        text = figures(results)
        self.console.line(f"evaluation at step {step}: {text}")
        log.info("evaluation at step %d: %s", step, text)

    def resumed(self, *, step: int, epoch: int, best: dict[str, Any] | None) -> None:
        """Report where this start goes on, and what it passed over."""
        for reason in self.start.passed_over:
            self.console.line(f"passed over: {reason}")
        text = f"resuming from {self.start.checkpoint}, step {step} of {self.total_steps}"
        self.console.line(text)
        log.info(text)
        if self.holds(str(self.start.checkpoint)):
            self._saver.go_on(Path(str(self.start.checkpoint)), best)
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
        """Raises HvdDDPError if the directory is another job's by now; OSError."""
        self._lock.check()
        path, text = self.directory / "summary.json", self._summary(status, results)
        try:
            replace_file(path, text)
        except OSError:
            overwrite(path, text)

    def _summary(self, status: str, results: dict[str, Any]) -> bytes:
        job = self.backend.launch.scheduler_job
        summary = {"status": status, "restart": self.start.restart, "job": job, **self._facts(), **results}
        return (json.dumps(summary, indent=1) + "\n").encode()
