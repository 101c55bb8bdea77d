"""One process, on one device; or over all GPUs that it sees, where this backend was asked for by name."""

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
    """The job is this process: nothing moves between processes.

    `--backend local` where torch sees several GPUs is torch's DataParallel over all of them, for programs that can't
    start a process a GPU; `auto` takes one GPU, for DDP is the way to several. Each forward copies the model to all
    GPUs and each computes its share of the batch, so that

    - BatchNorm goes by the share of each GPU, and keeps the statistics of the first one's alone; random numbers differ
      from one GPU's. Sums of gradients come in another order: equal to rounding, not to the bit.
    - a parameter that the forward did not use gets zeros where it would get no gradient, and so decays: it can't be
      named, nor left alone, and --find-unused-parameters is refused.
    """

    name = "local"
    _gpus = 1

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
        """Nothing to join: see how many GPUs there are."""
        if self.asked_for and self.device.type == "cuda" and (gpus := torch.cuda.device_count()) > 1:
            self._gpus = gpus
            self.why = (
                f"asked for: DataParallel over {gpus} GPUs. Prefer DDP (--nproc {gpus}): a process a GPU, where this "
                "is threads of one, which wait for each other and copy the model in every step"
            )

    def teardown(self) -> None:
        """Nothing to leave."""

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, *, accumulate: int = 1, find_unused_parameters: bool = False
    ) -> tuple[nn.Module, Optimizer]:
        if self._gpus > 1 and find_unused_parameters:
            raise HvdDDPError(
                f"--find-unused-parameters: DataParallel (--backend local on `{self._gpus}` GPUs) gives zeros to "
                f"parameters that were not used, so they can't be told. Use --nproc {self._gpus}, or leave --backend "
                "out for one GPU."
            )
        self._gradients = (
            FindUnused(model, all_reduce=lambda tensor, _: tensor.clone(), complete=True)
            if find_unused_parameters
            else AllUsed(model)
        )
        return nn.DataParallel(model) if self._gpus > 1 else model, optimizer

    @contextmanager
    def synchronize(self, optimizer: Optimizer) -> Iterator[None]:
        self._gradients.before()
        self._gradients.after()
        yield

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        return tensor.clone()

    def all_reduce_(self, tensor: Tensor) -> None:
        """The sum over one rank."""
