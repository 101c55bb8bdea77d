"""Which parameters got a gradient: refuse by name, or treat as one process would. The same under every backend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hvd_ddp.errors import HvdDDPError


class AllUsed:
    """Every parameter must get a gradient on every rank in every step; costs no communication."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def before(self) -> None:
        """Raise HvdDDPError that names the parameters without a gradient."""
        unused = [name for name, parameter in self._parameters if parameter.grad is None]
        if unused:
            raise HvdDDPError(
                f"{len(unused)} parameter(s) got no gradient in this step on this rank: `{', '.join(unused[:5])}`"
                f"{' ...' if len(unused) > 5 else ''}. Ranks would wait for each other for ever or drift apart. "
                "Freeze them (requires_grad=False), use them in every forward, or give --find-unused-parameters."
            )

    def last_micro_batch(self) -> None:
        """Mark the start of the only micro-batch whose backward communicates."""

    def after(self) -> None:
        """Do what is left when the averaged gradients are there."""


class FindUnused(AllUsed):
    """Parameters may stay without a gradient on some ranks (they count as zero) or on all (left untouched).

    Keeps two flags a parameter, reduced once a step: used in the step at all, and used in its last micro-batch. DDP
    looks only at the last one and would leave out gradients of the earlier; those are averaged here.
    """

    def __init__(self, model: nn.Module, *, all_reduce: Callable[[Tensor, str], Tensor], complete: bool) -> None:
        super().__init__(model)
        self._all_reduce, self._complete = all_reduce, complete
        self._used = torch.zeros(2, len(self._parameters), dtype=torch.int32)
        for index, (_, parameter) in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._mark(index))

    def _mark(self, index: int) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            self._used[:, index] = 1

        return mark

    def before(self) -> None:
        """Nothing is refused."""

    def last_micro_batch(self) -> None:
        """Forget what the earlier micro-batches used, in the second flag."""
        self._used[1] = 0

    def after(self) -> None:
        """Complete what the backend left out, and drop the gradients of parameters that no rank used."""
        anywhere, in_last = self._all_reduce(self._used, "max").tolist()
        self._used.zero_()
        for index, (_, parameter) in enumerate(self._parameters):
            if not anywhere[index]:
                parameter.grad = None
            elif not in_last[index] and not self._complete:
                self._average(parameter)

    def _average(self, parameter: nn.Parameter) -> None:
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        ranks = self._all_reduce(torch.ones(1), "sum").item()
        parameter.grad = self._all_reduce(mine, "sum") / ranks
