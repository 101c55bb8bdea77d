"""How DDP's gradients travel in fewer bytes: torch's communication hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hvd_ddp.config import CompressionName
from hvd_ddp.errors import HvdDDPError

RANK = 4  # columns of the two matrices that stand for a large one
# Steps that are averaged in full first: where the first gradients lead matters most, and DDP deals out its buckets anew
# after the first step, so 2 at least.
START = 10


class Whole:
    """Gradients as they are."""

    def register(self, wrapped: DistributedDataParallel) -> None:
        """Have `wrapped` average its buckets this way."""

    def after(self, model: nn.Module) -> None:
        """Look at the averaged gradients of a step."""


class Half(Whole):
    """16-bit floats, divided by the number of ranks before they are summed, so that sums overflow no earlier."""

    def __init__(self, name: CompressionName) -> None:
        self._hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[name]

    def register(self, wrapped: DistributedDataParallel) -> None:
        """Not the hook itself: by its name DDP refuses bf16 where there is no NCCL."""
        wrapped.register_comm_hook(None, lambda state, bucket: self._hook(state, bucket))


class PowerSGD(Whole):
    """Low-rank approximation with error feedback (Vogels, Karimireddy, Jaggi 2019, arxiv.org/abs/1905.13727).

    Each rank adds what it left out of a gradient to the next one. That memory is the rank's own, as large as the model,
    and in no checkpoint: it is empty after a resume, when START steps are averaged in full again.
    """

    def __init__(self) -> None:
        self._state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=START)

    def register(self, wrapped: DistributedDataParallel) -> None:
        """Raises HvdDDPError for a parameter that torch's hook can't take."""
        for name, parameter in wrapped.module.named_parameters():
            if parameter.requires_grad and parameter.dim() == 0:
                raise HvdDDPError(
                    f"--compression powersgd: parameter `{name}` has no dimension, which torch's hook can't take. Give "
                    "it the shape (1,), or use --compression fp16."
                )
        wrapped.register_comm_hook(None, lambda _, bucket: self._average(bucket))

    def _average(self, bucket: Any) -> Future[Tensor]:
        """One bucket after the other: over Gloo the collectives of several would meet in another order on each rank."""
        average = powerSGD_hook(self._state, bucket)
        average.wait()
        return average

    def after(self, model: nn.Module) -> None:
        """Begin anew where a gradient was not finite, the same on all ranks: the memory would keep that for ever."""
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if not bool(nn.utils.get_total_norm(gradients).isfinite()):
            for memory in (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict):
                memory.clear()


def compression(name: CompressionName) -> Whole:
    """What does it, for one wrapped model."""
    if name == "none":
        return Whole()
    return PowerSGD() if name == "powersgd" else Half(name)


def check_powersgd(device: torch.device) -> None:
    """Raise HvdDDPError where torch's hook can't work."""
    if device.type == "cpu" and torch.cuda.is_available():
        raise HvdDDPError(
            "--compression powersgd waits for the GPU in torch's hook, which fails for tensors of CPUs where torch "
            "sees a GPU, and --device is `cpu`. Hide the GPUs with CUDA_VISIBLE_DEVICES=, or use --compression fp16."
        )
