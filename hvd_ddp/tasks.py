"""What is learned: the loss of each sample, and the sums that evaluation reports."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional

from hvd_ddp.data.loader import Batch


class Task(Protocol):
    """A loss and its figures; the trainer divides by the right number of samples over all ranks."""

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """One loss a sample, (n,)."""

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over the samples of the batch, scalars; `loss` among them. Reported divided by the set's size."""


class Classification:
    """Cross-entropy with label smoothing; evaluation reports loss (without smoothing) and accuracy."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of each sample, (n,)."""
        return functional.cross_entropy(
            model(batch.inputs), batch.targets, reduction="none", label_smoothing=self.label_smoothing
        )

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums `loss` and `accuracy` (number of right answers)."""
        outputs = model(batch.inputs)
        return {
            "loss": functional.cross_entropy(outputs, batch.targets, reduction="none").double().sum(),
            "accuracy": (outputs.argmax(1) == batch.targets).sum(),
        }
