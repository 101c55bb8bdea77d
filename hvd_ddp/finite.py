"""Gradients that are not finite: which rank they come from, and that nothing of them is saved.

One on whatever rank makes the average not finite on all, and with it all parameters that it moves and what comes after.
So it is enough to look now and then, and before each save: looking is a pass over all gradients, for which the host
waits. Every rank sees the same and decides alike.
"""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_ddp.backends.base import Backend
from hvd_ddp.errors import HvdDDPError

MOST_SKIPPED = 100  # steps in a row, after which --on-nan skip ends: something that no step updates is not finite


class Finite:
    """What is known of it. `skip` leaves a step out whose gradient is not finite; else all ranks stop."""

    def __init__(self, backend: Backend, *, skip: bool) -> None:
        self._backend, self._skip = backend, skip
        self._skipped = 0  # steps in a row
        self._losses: list[tuple[int, Tensor]] = []  # of this rank, in the steps since the last look

    def stepped(self, step: int, loss: Tensor) -> None:
        """The sum of this rank's losses in the step that is under way; nothing waits for it."""
        self._losses.append((step, loss))

    def look(self, grad_norm: Tensor) -> bool:
        """Whether the gradient of the last step is. Raises HvdDDPError where it must be."""
        if bool(grad_norm.isfinite()):
            self._losses.clear()
            self._skipped = 0
            return True
        self._skipped += 1
        if not self._skip or self._skipped > MOST_SKIPPED:
            raise self._error(self._losses[-1][0])
        self._losses.clear()
        return False

    def check(self, optimizer: Optimizer, step: int) -> None:
        """Raise HvdDDPError where parameters or the optimizer's state are not after so many steps: not to be saved."""
        values = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
        values += [value for entry in optimizer.state.values() for value in entry.values()]
        tensors = [
            value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.numel()
        ]
        # Of the largest number, which overflows no more than they do.
        if not bool(nn.utils.get_total_norm(tensors, norm_type=math.inf).isfinite()):
            raise self._error(step - 1)

    def _error(self, last: int) -> HvdDDPError:
        """Of the first step in which a loss was not, else of the last one."""
        mine = next((step for step, loss in self._losses if not bool(loss.isfinite())), None)
        known: list[int | None] = self._backend.all_gather_object(mine)
        first = min((step for step in known if step is not None), default=last)
        return not_finite([rank for rank, step in enumerate(known) if step == first], first, self._skipped)


def not_finite(ranks: list[int], step: int, skipped: int) -> HvdDDPError:
    """What to say of it, with the ranks whose loss was not in that step."""
    several = "s" if len(ranks) > 1 else ""
    whose = f"the loss was not on rank{several} {', '.join(map(str, ranks[:8]))}" if ranks else "all losses were"
    remedy = "Use a smaller --lr, --clip-norm, or look at the data; --on-nan skip leaves such steps out."
    if skipped > MOST_SKIPPED:
        remedy = f"It is number {skipped} in a row: what is broken is not mended by leaving steps out."
    return HvdDDPError(
        f"The gradient of step {step} (from 0) is not finite; {whose}. Nothing of it is saved; all ranks stop. "
        f"{remedy} The same command goes on from the last checkpoint."
    )
