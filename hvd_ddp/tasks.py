"""What is learned: the loss of each sample, and the sums that evaluation reports."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ddp.data.loader import Batch
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.models import load_factory

CLASSIFICATION = "classification"
# What else stands beside the figures of an evaluation, in metrics.jsonl and summary.json.
TAKEN = frozenset({"best", "cut_short", "epoch", "epochs", "kind", "num_samples", "phases", "samples_per_second",
                   "seconds", "status", "step", "steps"})  # fmt: skip
Figures = dict[str, Tensor]


class Task(Protocol):
    """A loss and its figures; the trainer divides by the right number of samples over all ranks.

    `batch.inputs` (n, ...) and `batch.targets` (n, ...) are on the device; in training `model` is the wrapped one, to
    be called once in each `losses`. What is random in there is seeded for each step. A task may also have
    `predict(model, batch)`: columns of the file that `predict` writes, by name, each a tensor (n,) or strings; without
    it there is one, the loss.
    """

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """One loss a sample, (n,), floating-point, from which gradients flow."""

    def evaluate(self, model: nn.Module, batch: Batch) -> Figures:
        """Sums over the samples of the batch, scalars; `loss` among them. Reported divided by the set's size.

        The best model is the one with the highest `accuracy`, or without one the lowest `loss`.
        """


class Classification:
    """Cross-entropy with label smoothing; evaluation reports loss (without smoothing) and accuracy."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of each sample, (n,)."""
        return functional.cross_entropy(
            model(batch.inputs), batch.targets, reduction="none", label_smoothing=self.label_smoothing
        )

    def evaluate(self, model: nn.Module, batch: Batch) -> Figures:
        """Sums `loss` and `accuracy` (number of right answers)."""
        outputs = model(batch.inputs)
        return {
            "loss": functional.cross_entropy(outputs, batch.targets, reduction="none").double().sum(),
            "accuracy": (outputs.argmax(1) == batch.targets).sum(),
        }

    def predict(self, model: nn.Module, batch: Batch) -> Figures:
        """The class of each sample, the predicted one, and its probability, (n,) each."""
        outputs = model(batch.inputs)
        if outputs.ndim != 2:
            raise HvdDDPError(
                f"The model gives `{tuple(outputs.shape)}` for {len(batch.targets)} samples, not a number for each "
                "class: this is no classification. Give a --task of its own."
            )
        probabilities, classes = outputs.double().softmax(1).max(1)
        return {"target": batch.targets, "prediction": classes, "probability": probabilities}


def build(name: str, label_smoothing: float = 0.0) -> Task:
    """The task of that name, or what `module:Task`, a class or a function, makes without an argument.

    Raises HvdDDPError for what is none.
    """
    if name == CLASSIFICATION:
        return Classification(label_smoothing)
    if ":" not in name:
        guess = " Did you mean `classification`?" if difflib.get_close_matches(name, [CLASSIFICATION], 1) else ""
        raise HvdDDPError(f"--task is `{name}`, which is neither classification nor module:Task.{guess}")
    factory = load_factory("--task", name)
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError) as error:
        raise HvdDDPError(f"--task `{name}` can't be called without an argument: {error}. Mend it.") from error
    task: Task = factory()
    lacking = [method for method in ("losses", "evaluate") if not callable(getattr(task, method, None))]
    if lacking:
        raise HvdDDPError(
            f"--task `{name}` made a `{type(task).__name__}` without `{'` and `'.join(lacking)}`: nothing can be "
            "learned with that. A task has losses(model, batch) and evaluate(model, batch)."
        )
    return task


class Checked:
    """A task whose answers are looked at, by their form alone, for which no device is waited for.

    All raise HvdDDPError for wrong ones; `try_out` does so before anything starts.
    """

    def __init__(self, task: Task) -> None:
        self.task, self.name = task, type(task).__name__

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """The task's own, (n,)."""
        losses: Any = self.task.losses(model, batch)
        n = len(batch.inputs)
        if not isinstance(losses, Tensor) or losses.shape != (n,) or not losses.is_floating_point():
            raise HvdDDPError(
                f"`{self.name}.losses` returned {_form(losses)} for {n} samples: what the step is the mean of is not "
                f"known. Return one floating-point loss a sample, ({n},): reduction='none', and the mean or sum over "
                "all other dimensions."
            )
        if torch.is_grad_enabled() and not losses.requires_grad:
            raise HvdDDPError(
                f"`{self.name}.losses` returned losses from which no gradient flows: nothing would be learned. Compute "
                "them from what `model` returns, without detach() or no_grad()."
            )
        return losses

    def evaluate(self, model: nn.Module, batch: Batch) -> Figures:
        """The task's own sums."""
        sums: Any = self.task.evaluate(model, batch)
        known = isinstance(sums, Mapping) and all(isinstance(name, str) for name in sums)
        if not known or "loss" not in sums:
            told = f"`{', '.join(sums)}`" if known else f"a `{type(sums).__name__}`"
            raise HvdDDPError(
                f"`{self.name}.evaluate` returned {told}, without `loss`: nobody could tell a better model. Return a "
                "dict of sums over the samples of the batch, `loss` among them."
            )
        for name, value in sums.items():
            if name in TAKEN:
                raise HvdDDPError(f"`{self.name}.evaluate` returned `{name}`, which means something else. Rename it.")
            if not ((isinstance(value, Tensor) and value.ndim == 0) or type(value) in (int, float)):
                raise HvdDDPError(
                    f"`{self.name}.evaluate` returned {_form(value)} as `{name}`, not a number. Return its sum over "
                    "the samples of the batch."
                )
        return dict(sums)

    def predict(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Columns of `predict`, each with a value a sample: (n,), or strings."""
        own = getattr(self.task, "predict", None)
        columns: Any = {"loss": self.losses(model, batch)} if own is None else own(model, batch)
        n = len(batch.inputs)
        for name, column in columns.items() if isinstance(columns, Mapping) else [("", columns)]:
            fits = column.shape == (n,) if isinstance(column, Tensor) else isinstance(column, list) and len(column) == n
            if not fits:
                raise HvdDDPError(
                    f"`{self.name}.predict` returned {_form(column)} as `{name}` for {n} samples. Return a dict of "
                    "columns, each a tensor (n,) or a list of strings."
                )
        return dict(columns)

    def try_out(self, model: nn.Module, batch: Batch) -> None:
        """Ask it for the losses and sums of a batch. Nothing of the model changes."""
        if type(self.task) is Classification:
            return
        was_training = model.training
        model.eval()
        try:
            self.losses(model, batch)
            with torch.no_grad():
                self.evaluate(model, batch)
        finally:
            model.train(was_training)


def _form(value: Any) -> str:
    return f"{value.dtype} `{tuple(value.shape)}`" if isinstance(value, Tensor) else f"a `{type(value).__name__}`"
