"""Trainer: from a batch to a step, the same text under every backend."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hvd_ddp import checkpoint
from hvd_ddp.assemble import check, load_task, try_out
from hvd_ddp.backends.base import Backend, average_buffers
from hvd_ddp.config import TrainConfig
from hvd_ddp.data.arrays import Data
from hvd_ddp.data.feed import Place, Rank, Step, feed
from hvd_ddp.data.loader import Batch
from hvd_ddp.decisions import Decisions
from hvd_ddp.ema import Average, NoAverage
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.evaluation import evaluate
from hvd_ddp.finite import Finite
from hvd_ddp.metrics import Interval
from hvd_ddp.models import left_alone, move
from hvd_ddp.optim import clip, learning_rate, load
from hvd_ddp.precision import Precision
from hvd_ddp.profiling import profiled
from hvd_ddp.replicas import check_replicas
from hvd_ddp.run import Run
from hvd_ddp.seeding import seed_step
from hvd_ddp.snapshot import refuse_foreign
from hvd_ddp.tasks import Task


class Trainer:
    """Trains `model` with `optimizer` on `data` over the ranks of `backend`, which is set up already.

    `model` stays bare: state dicts have no prefix, evaluation uses it. `step` counts global batches used, `updates`
    the optimizer's steps: fewer when fp16 overflowed. Raises HvdDDPError for options that do not fit the data or the
    number of ranks.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        optimizer: Optimizer,
        data: Data,
        backend: Backend,
        *,
        task: Task | None = None,
    ) -> None:
        check(config, data, backend.launch.world_size, backend.communication)
        self.config, self.data, self.backend = config, data, backend
        self.pulse, self.stop = backend.meeting.pulse, backend.meeting.stop
        self.task = load_task(config, data, backend, task)
        self.precision = Precision(config.precision, backend.device)
        model = backend.sync_batchnorm(model) if config.sync_bn else model
        self.model = move(model, backend.device, self.precision.dtype, channels_last=config.channels_last)
        self.wrapped, self.optimizer = backend.prepare(
            self.model, optimizer, accumulate=config.accumulate, find_unused_parameters=config.find_unused_parameters
        )
        if config.compile:
            self.wrapped.compile()
        self.average = NoAverage() if config.ema is None else Average(self.model, config.ema)
        launch = backend.launch
        rank = Rank(launch.rank, launch.world_size, launch.local_world_size or 1)
        self.feed = feed(config, data, rank, device=backend.device, dtype=self.precision.dtype, agree=self._agree)
        self.step = self.updates = 0
        self.place = Place()
        self.total_steps = config.max_steps or config.epochs * self.feed.steps_per_epoch
        self._norms = [module for module in self.model.modules() if isinstance(module, _NormBase)]
        self._interval = Interval(backend)
        self._finite = Finite(backend, skip=config.on_nan == "skip")
        self._grad_norm = torch.zeros(())  # of the last step whose norm was asked for
        self._averaged_at = self._saved_at = self._evaluated_at = -1  # steps
        self.decisions = Decisions()
        self._num_samples = 0  # used since the start, by all ranks
        self._cut_short = False  # the evaluation, by an order to stop

    def fit(self) -> dict[str, Any]:
        """Train to the end, or to an early stop, from wherever the run directory is; returns the summary.

        Its "status" is "finished" or "preempted".
        """
        with (
            closing(self.feed),
            Run(self.config, self.backend, total_steps=self.total_steps, num_samples=self.data.num_train) as run,
        ):
            if run.start.finished:
                run.already_finished()
                return {"status": "finished"}
            if run.start.checkpoint is not None:
                self._resume(run, run.start.checkpoint)  # before anything is written: it may not fit
            refuse_foreign(self.state_dict())
            try_out(self.task, self.model, self.data, self.precision, self.backend)
            run.open()
            if run.start.checkpoint is not None:
                run.resumed(step=self.step, epoch=self.place.epoch + self.place.ended, best=self.decisions.best)
            with self.pulse.long_work("starting loader workers"):
                self.feed.start()
            self.stop.instead_of_dying()
            return self._fit(run)

    def _fit(self, run: Run) -> dict[str, Any]:
        began, results = time.perf_counter(), {}
        if self.step == self.total_steps or (self.step != self._evaluated_at and self._evaluation_due()):
            results = self._evaluate(run)  # a stop or a kill came before it
        for step in self._steps(run.trace):
            self.train_step(step.micros, step.window)
            self.place = step.place
            if self._log_due(self.step):
                self._log(run)
            if self._evaluation_due():
                results = self._evaluate(run)
            if self.config.check_replicas and self.step % self.config.check_replicas == 0:
                check_replicas(self.backend, self.model, self.optimizer, step=self.step)
            if self._save_due():
                self._save(run)
        ended = self.step == self._evaluated_at and (self.step == self.total_steps or self.decisions.end(self.config))
        status = "finished" if ended else "preempted"
        if status == "preempted":
            run.stopping(step=self.step)
        self._save(run)
        speed = self._num_samples / (time.perf_counter() - began)
        results |= {"steps": self.step, "epochs": self.feed.epochs(self.place), "samples_per_second": speed}
        results |= {"best": self.decisions.best, "phases": self._interval.phases()}
        run.finish_saving()
        return run.close(status, results)

    def train_step(self, micros: list[Batch], window: int) -> None:
        """One optimizer step: this rank's micro-batches of a global batch of `window` samples over all ranks."""
        backend, pulse, world_size = self.backend, self.pulse, self.backend.launch.world_size
        seed_step(self.config.seed, self.step, backend.launch.rank, backend.device)  # dropout: no state to restore
        rate = learning_rate(
            self.config, self.updates,
            total=self.total_steps, steps_per_epoch=self.feed.steps_per_epoch, drops=self.decisions.drops,
        )  # fmt: skip
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), dtype=torch.float64, device=backend.device)
        for number, micro in enumerate(micros, 1):
            pulse.at("forward")
            with backend.no_sync(self.wrapped) if number < len(micros) else nullcontext():
                losses = self._losses(micro)
                pulse.at("backward")
                # Backends average over ranks: times world_size it is the gradient of the mean over the window.
                self.precision.backward(losses.sum() * (world_size / window))
            total += losses.detach().sum()
        pulse.at("averaging gradients")
        with backend.synchronize(self.optimizer):
            pulse.at("updating parameters")
            self.precision.unscale(self.optimizer)
            if self._may_update(total):
                self.updates += self.precision.step(self.optimizer)
                self._interval.step(total, micros)
            else:
                self._interval.skipped()
        self.average.update(self.updates)
        self.optimizer.zero_grad()
        self.step += 1
        self._num_samples += window
        pulse.step = self.step

    def _losses(self, batch: Batch) -> Tensor:
        """One loss a sample; zeros for a stand-in, whose forward only makes this rank take part."""
        statistics = nullcontext() if batch.num_samples else left_alone(self._norms)
        with statistics, self.precision.autocast():
            losses = self.task.losses(self.wrapped, batch)
        return losses if batch.num_samples else losses * 0

    def _may_update(self, loss: Tensor) -> bool:
        """Clip the averaged gradient; whether it is finite, where that is asked for: the same on every rank."""
        asked = self.config.clip_norm is not None or self.config.on_nan == "skip" or self._log_due(self.step + 1)
        if asked:
            self._grad_norm = clip(self.model.parameters(), self.config.clip_norm)
        if self.precision.scaler.is_enabled():  # it looks itself
            return True
        self._finite.stepped(self.step, loss)
        return not asked or self._finite.look(self._grad_norm)

    def evaluate(self) -> dict[str, float]:
        """Means over the evaluation set, each sample counted once over all ranks, and `num_samples`.

        Empty when the job is told to stop meanwhile.
        """
        self._average_buffers()
        with self.average.applied():
            return evaluate(self.model, self.feed, task=self.task, precision=self.precision, backend=self.backend)

    def state_dict(self) -> dict[str, Any]:
        """All that goes on in another process needs, in plain types."""
        return {
            "model": self.model.state_dict(),
            "ema": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "decisions": self.decisions.to_save(),
            "progress": {"step": self.step, "updates": self.updates, "evaluated_at": self._evaluated_at},
            "place": self.feed.to_save(self.place),
            "total_steps": self.total_steps,
            "config": self.config.to_dict(),
            "data": {"name": self.data.name, "num_samples": self.data.num_train, "num_classes": self.data.num_classes},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()` of any number of ranks and any backend."""
        self.model.load_state_dict(dict(state["model"]))  # without what torch keeps beside it
        self.average.load_state_dict(state.get("ema", {}))
        load(self.optimizer, state["optimizer"])
        self.precision.scaler.load_state_dict(state["scaler"])
        self.decisions = Decisions(**state.get("decisions", {}))
        progress = state["progress"]
        self.step, self.updates = progress["step"], progress["updates"]
        self.place = self.feed.place(self.step, state.get("place", {}))
        self._evaluated_at = progress.get("evaluated_at", -1)

    def _steps(self, trace: Path | None) -> Iterator[Step]:
        """From the present step to the last."""
        steps = self.feed.steps(self.place, self.total_steps - self.step)
        with profiled(trace) as stepped:
            while self.step < self.total_steps and not self.decisions.end(self.config):
                if self.stop.after(self.step, known=self._cut_short):
                    return
                self.pulse.at("loading data")
                yield next(steps)
                stepped()

    def _agree(self, counts: list[int]) -> list[int]:
        """The sums over all ranks: of samples in steps of a stream."""
        self.pulse.at("meeting the others")
        sums: list[int] = self.backend.all_reduce(torch.tensor(counts, device=self.backend.device)).tolist()
        self.pulse.at("loading data")
        return sums

    def _log_due(self, step: int) -> bool:
        return step % self.config.log_every == 0 or step == self.total_steps

    def _save_due(self) -> bool:
        every = self.config.save_every
        due = self.place.ended if every is None else self.step % every == 0
        return due or self.step == self.total_steps or self._is_best()

    def _is_best(self) -> bool:
        return self.decisions.best is not None and self.decisions.best["step"] == self.step

    def _evaluation_due(self) -> bool:
        ended = self.place.ended and (self.place.epoch + 1) % self.config.eval_every == 0
        return self.step > 0 and (ended or self.step == self.total_steps)

    def _average_buffers(self) -> None:
        if self._averaged_at != self.step:
            self.pulse.at("meeting the others")
            average_buffers(self.backend, self.model)
            self._averaged_at = self.step

    def _resume(self, run: Run, origin: str) -> None:
        try:
            with self.pulse.long_work("reading the checkpoint"):
                self.load_state_dict(checkpoint.parse(run.checkpoint_bytes(), origin))
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise HvdDDPError(
                f"Checkpoint `{origin}` does not fit --model {self.config.model} any more: "
                f"{' '.join(str(error).split())[:300]}. Use the code that wrote it, or another --run-dir."
            ) from error
        self._averaged_at = self.pulse.step = self.step
        if run.holds(origin):
            self._saved_at = self.step

    def _save(self, run: Run) -> None:
        if self._saved_at != self.step:
            self._finite.check(self.optimizer, self.step)
            self._average_buffers()
            if self.config.check_replicas:
                check_replicas(self.backend, self.model, self.optimizer, step=self.step, buffers=True)
            with self.pulse.long_work("saving"):
                run.save(self.step, self.state_dict())
            self._saved_at = self.step

    def _log(self, run: Run) -> None:
        self.pulse.at("logging")
        rate, norm = self.optimizer.param_groups[0]["lr"], float(self._grad_norm)
        run.trained(step=self.step, epoch=self.place.epoch, lr=rate, grad_norm=norm, **self._interval.row())

    def _evaluate(self, run: Run) -> dict[str, Any]:
        results = self.evaluate()
        self._cut_short = not results
        if self._cut_short:
            return {}
        self._evaluated_at = self.step
        self.decisions.take(self.config, self.step, results)
        if self._is_best():
            self._saved_at = -1  # a checkpoint of this step that is there already does not know it
        run.evaluated(step=self.step, epoch=self.place.epoch, results=results)
        return {name: value for name, value in results.items() if name != "num_samples"}
