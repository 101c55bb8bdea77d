"""Trainer: from a batch to a step, the same text under every backend."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hvd_ddp import checkpoint
from hvd_ddp.assemble import check
from hvd_ddp.backends.base import Backend, average_buffers
from hvd_ddp.config import TrainConfig
from hvd_ddp.data.arrays import Data
from hvd_ddp.data.augment import choose
from hvd_ddp.data.loader import ArrayLoader, Batch
from hvd_ddp.data.sampler import GlobalBatchSampler
from hvd_ddp.ema import Average, NoAverage
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.evaluation import better, evaluate
from hvd_ddp.metrics import Sums
from hvd_ddp.optim import learning_rate
from hvd_ddp.precision import Precision
from hvd_ddp.run import Run
from hvd_ddp.seeding import seed_step
from hvd_ddp.snapshot import refuse_foreign
from hvd_ddp.tasks import Classification, Task


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
        check(config, data, backend.launch.world_size)
        self.config, self.data, self.backend = config, data, backend
        self.pulse, self.stop = backend.meeting.pulse, backend.meeting.stop
        self.task = task or Classification(config.label_smoothing)
        self.precision = Precision(config.precision, backend.device)
        model = backend.sync_batchnorm(model) if config.sync_bn else model
        self.model = model.to(backend.device, self.precision.dtype)
        self.wrapped, self.optimizer = backend.prepare(
            self.model,
            optimizer,
            accumulate=config.accumulate,
            find_unused_parameters=config.find_unused_parameters,
        )
        self.average = NoAverage() if config.ema is None else Average(self.model, config.ema)
        self.step = self.updates = 0
        self.steps_per_epoch = -(-len(data.train) // config.global_batch)
        self.total_steps = config.max_steps or config.epochs * self.steps_per_epoch
        augment = choose(config.augment, data, seed=config.seed)
        self._loaders = [
            ArrayLoader(part, augment, mean=data.mean, std=data.std, device=backend.device, dtype=self.precision.dtype)
            for part in (data.train, data.eval)
        ]
        self._norms = [module for module in self.model.modules() if isinstance(module, _NormBase)]
        self._sums = Sums(backend.device)
        self._grad_norm: Tensor | None = None
        self._averaged_at = self._saved_at = self._evaluated_at = -1  # steps
        self.best: dict[str, Any] | None = None  # evaluation: its step, and accuracy or loss
        self._data_wait = 0.0  # seconds since the last log
        self._cut_short = False  # the evaluation, by an order to stop

    def fit(self) -> dict[str, Any]:
        """Train to the end, or to an early stop, from wherever the run directory is; returns the summary.

        Its "status" is "finished" or "preempted".
        """
        num_samples = len(self.data.train)
        with Run(self.config, self.backend, total_steps=self.total_steps, num_samples=num_samples) as run:
            if run.start.finished:
                run.already_finished()
                return {"status": "finished"}
            if run.start.checkpoint is not None:
                self._resume(run, run.start.checkpoint)  # before anything is written: it may not fit
            refuse_foreign(self.state_dict())
            run.open()
            if run.start.checkpoint is not None:
                run.resumed(step=self.step, epoch=self.step // self.steps_per_epoch, best=self.best)
            self.stop.instead_of_dying()
            return self._fit(run)

    def _fit(self, run: Run) -> dict[str, Any]:
        self._interval = time.perf_counter()
        began, first, results = self._interval, self.step, {}
        if self.step == self.total_steps or (self.step != self._evaluated_at and self._evaluation_due()):
            results = self._evaluate(run)  # a stop or a kill came before it
        for micros, window in self._batches():
            self.train_step(micros, window)
            if self.step % self.config.log_every == 0 or self.step == self.total_steps:
                self._log(run)
            if self._evaluation_due():
                results = self._evaluate(run)
            if self._due(self.config.save_every or self.steps_per_epoch) or self._is_best():
                self._save(run)
        status = "finished" if self.step == self._evaluated_at == self.total_steps else "preempted"
        if status == "preempted":
            run.stopping(step=self.step)
        self._save(run)
        speed = (self._samples(self.step) - self._samples(first)) / (time.perf_counter() - began)
        results |= {"steps": self.step, "epochs": self.step / self.steps_per_epoch, "samples_per_second": speed}
        results["best"] = self.best
        run.finish_saving()
        return run.close(status, results)

    def train_step(self, micros: list[Batch], window: int) -> None:
        """One optimizer step: this rank's micro-batches of a global batch of `window` samples over all ranks."""
        backend, world_size = self.backend, self.backend.launch.world_size
        pulse = self.pulse
        seed_step(self.config.seed, self.step, backend.launch.rank, backend.device)  # dropout: no state to restore
        rate = learning_rate(self.config, self.updates, total=self.total_steps, steps_per_epoch=self.steps_per_epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for number, micro in enumerate(micros, 1):
            pulse.at("forward")
            with backend.no_sync(self.wrapped) if number < len(micros) else nullcontext():
                losses = self._losses(micro)
                pulse.at("backward")
                # Backends average over ranks: times world_size it is the gradient of the mean over the window.
                self.precision.backward(losses.sum() * (world_size / window))
            self._sums.add("loss", losses.detach().sum())
            self._sums.add("num_samples", micro.num_samples)
        pulse.at("averaging gradients")
        with backend.synchronize(self.optimizer):
            pulse.at("updating parameters")
            self.precision.unscale(self.optimizer)
            self._grad_norm = self._clip()
            self.updates += self.precision.step(self.optimizer)
        self.average.update(self.updates)
        self.optimizer.zero_grad()
        self.step += 1
        pulse.step = self.step

    def _losses(self, batch: Batch) -> Tensor:
        """One loss a sample; zeros for a stand-in, whose forward only makes this rank take part."""
        if batch.num_samples:
            with self.precision.autocast():
                return self.task.losses(self.wrapped, batch)
        training = [norm for norm in self._norms if norm.training]
        for norm in training:  # a stand-in stays out of the batch statistics
            norm.eval()
        with self.precision.autocast():
            losses = self.task.losses(self.wrapped, batch) * 0
        for norm in training:
            norm.train()
        return losses

    def _clip(self) -> Tensor | None:
        if self.config.clip_norm is not None:
            return nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        if (self.step + 1) % self.config.log_every:
            return None  # nobody asks for it
        norms = [torch.linalg.vector_norm(p.grad) for p in self.model.parameters() if p.grad is not None]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else None

    def evaluate(self) -> dict[str, float]:
        """Means over the evaluation set, each sample counted once over all ranks, and `num_samples`.

        Empty when the job is told to stop meanwhile.
        """
        self._average_buffers()
        with self.average.applied():
            return evaluate(
                self.model, self._loaders[1], task=self.task, precision=self.precision, backend=self.backend
            )

    def state_dict(self) -> dict[str, Any]:
        """All that goes on in another process needs, in plain types."""
        return {
            "model": self.model.state_dict(),
            "ema": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "best": self.best,
            "progress": {"step": self.step, "updates": self.updates, "evaluated_at": self._evaluated_at},
            "total_steps": self.total_steps,
            "config": self.config.to_dict(),
            "data": {"name": self.data.name, "num_samples": len(self.data.train), "num_classes": self.data.num_classes},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()` of any number of ranks and any backend."""
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state.get("ema", {}))
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.scaler.load_state_dict(state["scaler"])
        self.best = state.get("best")
        progress = state["progress"]
        self.step, self.updates = progress["step"], progress["updates"]
        self._evaluated_at = progress.get("evaluated_at", -1)

    def _batches(self) -> Iterator[tuple[list[Batch], int]]:
        """From the present step to the last: this rank's micro-batches, and the samples that all ranks use."""
        launch, config = self.backend.launch, self.config
        while self.step < self.total_steps:
            epoch, start = divmod(self.step, self.steps_per_epoch)
            sampler = GlobalBatchSampler(
                len(self.data.train), config.global_batch,
                rank=launch.rank, world_size=launch.world_size, seed=config.seed, epoch=epoch, start=start,
            )  # fmt: skip
            for indices, window in sampler:
                if self.stop.after(self.step, known=self._cut_short):
                    return
                self.pulse.at("loading data")
                began = time.perf_counter()
                micros = self._loaders[0].micro_batches(indices, config.accumulate, epoch)
                self._data_wait += time.perf_counter() - began
                yield micros, window
                if self.step >= self.total_steps:
                    return

    def _samples(self, step: int) -> int:
        """Samples used up to that step."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * len(self.data.train) + steps * self.config.global_batch

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.total_steps

    def _evaluation_due(self) -> bool:
        return self.step > 0 and self._due(self.config.eval_every * self.steps_per_epoch)

    def _is_best(self) -> bool:
        return self.best is not None and self.best["step"] == self.step

    def _average_buffers(self) -> None:
        if self._averaged_at != self.step:
            self.pulse.at("meeting the others")
            average_buffers(self.backend, self.model)
            self._averaged_at = self.step

    def _resume(self, run: Run, origin: str) -> None:
        try:
            with self.pulse.long_work("reading the checkpoint"):
                self.load_state_dict(checkpoint.parse(run.checkpoint_bytes(), origin))
        except (RuntimeError, ValueError, KeyError) as error:
            raise HvdDDPError(
                f"Checkpoint `{origin}` does not fit --model {self.config.model} any more: "
                f"{' '.join(str(error).split())[:300]}. Use the code that wrote it, or another --run-dir."
            ) from error
        self._averaged_at = self.pulse.step = self.step
        if run.holds(origin):
            self._saved_at = self.step

    def _save(self, run: Run) -> None:
        if self._saved_at != self.step:
            self._average_buffers()
            with self.pulse.long_work("saving"):
                run.save(self.step, self.state_dict())
            self._saved_at = self.step

    def _log(self, run: Run) -> None:
        self.pulse.at("logging")
        sums = self._sums.reduce(self.backend, ["loss", "num_samples"])
        now = time.perf_counter()
        run.trained(
            step=self.step,
            epoch=(self.step - 1) // self.steps_per_epoch,
            loss=sums["loss"] / sums["num_samples"],
            lr=self.optimizer.param_groups[0]["lr"],
            grad_norm=None if self._grad_norm is None else float(self._grad_norm),
            samples_per_second=sums["num_samples"] / (now - self._interval),
            data_wait=self._data_wait / (now - self._interval),  # share of the time, on this rank
        )
        self._interval, self._data_wait = now, 0.0

    def _evaluate(self, run: Run) -> dict[str, Any]:
        results = self.evaluate()
        self._cut_short = not results
        if self._cut_short:
            return {}
        self._evaluated_at = self.step
        self.best = better(self.best, self.step, results)
        if self._is_best():
            self._saved_at = -1  # a checkpoint of this step that is there already does not know it
        run.evaluated(step=self.step, epoch=(self.step - 1) // self.steps_per_epoch, results=results)
        return {name: value for name, value in results.items() if name != "num_samples"}
