"""One process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvd_ddp.backends.base import Backend, Op
from hvd_ddp.backends.gradients import AllUsed, FindUnused
from hvd_ddp.config import Communication
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch


class LocalBackend(Backend):
    """The job is this process: nothing moves."""

    name = "local"

    @classmethod
    def choose_transport(cls, transport: str, launch: Launch, device: torch.device) -> str:
        if launch.world_size > 1:
            raise HvdDDPError(
                f"--backend local is one process, but {launch.launcher} started `{launch.world_size}`: each would "
                "train alone. Use --backend ddp or horovod, or start one process."
            )
        return "none"

    @classmethod
    def check(cls, communication: Communication, transport: str, launch: Launch, device: torch.device) -> None:
        """Nothing moves, so nothing is refused: a run may go on here that compressed its gradients on several ranks."""

    def setup(self) -> None:
        """Nothing to join."""

    def teardown(self) -> None:
        """Nothing to leave."""

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, *, accumulate: int = 1, find_unused_parameters: bool = False
    ) -> tuple[nn.Module, Optimizer]:
        self._gradients = (
            FindUnused(model, all_reduce=lambda tensor, _: tensor.clone(), complete=True)
            if find_unused_parameters
            else AllUsed(model)
        )
        return model, optimizer

    @contextmanager
    def synchronize(self, optimizer: Optimizer) -> Iterator[None]:
        self._gradients.before()
        self._gradients.after()
        yield

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        return tensor.clone()

    def all_reduce_(self, tensor: Tensor) -> None:
        """The sum over one rank."""
