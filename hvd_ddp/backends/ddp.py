"""torch DistributedDataParallel over nccl, gloo or mpi."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Imported before there is a group: its functions have the default group of that moment as a default argument, and DDP's
# constructor imports it. A group that outlives its teardown ends with the interpreter, and now and then with
# "terminate called without an active exception" and exit code 134 (torch 2.14.1, in plain DDP scripts as well).
import torch.distributed.nn.functional
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hvd_ddp.backends import mpi, mpi_group
from hvd_ddp.backends.base import Backend, Op
from hvd_ddp.backends.buckets import SIZE
from hvd_ddp.backends.compression import check_powersgd, compression
from hvd_ddp.backends.gradients import AllUsed, FindUnused
from hvd_ddp.config import Communication
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch, export

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class DDPBackend(Backend):
    """Gradients are averaged in buckets while backward still runs."""

    name = "ddp"
    _setups = 0

    @classmethod
    def choose_transport(cls, transport: str, launch: Launch, device: torch.device) -> str:
        chosen = _fastest(launch, device) if transport == "auto" else transport
        if chosen == "nccl" and device.type != "cuda":
            raise HvdDDPError("--transport nccl moves tensors of GPUs, and --device is `cpu`. Use --transport gloo.")
        if chosen == "mpi" and device.type != "cpu":
            raise HvdDDPError(
                f"--transport mpi moves tensors of CPUs, and --device is `{device}`. Use --transport nccl."
            )
        if chosen == "mpi":
            mpi.check(launch)
        return chosen

    @classmethod
    def check(cls, communication: Communication, transport: str, launch: Launch, device: torch.device) -> None:
        for name in communication.given():
            if name not in ("compression", "bucket_mb"):
                raise HvdDDPError(
                    f"--{name.replace('_', '-')} tells Horovod what to do, and this job runs under DDP. Use --backend "
                    f"horovod, or {'--bucket-mb' if name == 'fusion_mb' else 'leave it out'}."
                )
        if communication.compression == "powersgd":
            check_powersgd(device)

    def setup(self) -> None:
        self._wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        DDPBackend._setups += 1  # a store remembers: each group needs a prefix of its own
        export({"GLOO_SOCKET_IFNAME": self.meeting.interface})
        export({"NCCL_SOCKET_IFNAME": "=" + self.meeting.interface}, over_the_users=False)  # who may name several
        if self.transport == "mpi":
            mpi.join(self.launch)
            mpi_group.register()
        dist.init_process_group(
            mpi_group.NAME if self.transport == "mpi" else self.transport,
            store=PrefixStore(f"ddp/{DDPBackend._setups}", self.meeting.store),
            rank=self.launch.rank,
            world_size=self.launch.world_size,
            timeout=timedelta(seconds=self.timeout),
        )

    def lost_a_peer(self, error: BaseException) -> bool:
        # Of Gloo plain RuntimeErrors come through, with its source file in their text; of MPI with our error's name.
        return isinstance(error, dist.DistError | mpi_group.MPIError) or (
            isinstance(error, RuntimeError)
            and any(word in str(error) for word in ("gloo/", mpi_group.MPIError.__name__))
        )

    def teardown(self) -> None:
        for wrapped in self._wrapped:
            # The caller's reference must not keep the group alive: see the import above.
            for name in ("reducer", "logger", "process_group"):
                setattr(wrapped, name, None)
        self._wrapped.clear()
        group = dist.group.WORLD
        if isinstance(group, mpi_group.MPIGroup):
            group.shutdown()  # older torch leaves that out for groups that it does not know
        dist.destroy_process_group()

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, *, accumulate: int = 1, find_unused_parameters: bool = False
    ) -> tuple[nn.Module, Optimizer]:
        self._gradients = (
            FindUnused(model, all_reduce=self.all_reduce, complete=False)  # type: ignore[arg-type]
            if find_unused_parameters
            else AllUsed(model)
        )
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=True,  # saves a copy of all gradients, the second of two
            **_bucket_size(self.communication.bucket_mb, self.transport),
            **_no_buffers_in_forward(),
        )
        self._compression = compression(self.communication.compression)
        self._compression.register(wrapped)
        self._model = model
        self._wrapped.add(wrapped)
        self._mark_the_end_of_computing(wrapped)
        return wrapped, optimizer

    def _mark_the_end_of_computing(self, wrapped: DistributedDataParallel) -> None:
        """Backward also waits for what is still under way when the last gradient is there: a phase of its own.

        That is the gradient of what forward uses first, for most models the first parameter.
        """
        pulse, known = self.meeting.pulse, weakref.ref(wrapped)

        def mark(_: Tensor) -> None:
            wrapped = known()
            if wrapped is not None and wrapped.require_backward_grad_sync:
                pulse.at("averaging gradients")

        first = next(parameter for parameter in wrapped.module.parameters() if parameter.requires_grad)
        first.register_post_accumulate_grad_hook(mark)

    @contextmanager
    def no_sync(self, wrapped: nn.Module) -> Iterator[None]:
        with wrapped.no_sync():  # type: ignore[operator]
            yield
        self._gradients.last_micro_batch()

    @contextmanager
    def synchronize(self, optimizer: Optimizer) -> Iterator[None]:
        self._gradients.before()
        self._gradients.after()
        self._compression.after(self._model)
        yield

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        result = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(result, OPS[op])
        return result.to(tensor.device)

    def all_reduce_(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, async_op=True).wait()


def _fastest(launch: Launch, device: torch.device) -> str:
    """The transport that `auto` stands for; README.md has the measurements."""
    if device.type == "cuda" and dist.is_nccl_available():
        return "nccl"
    return "mpi" if device.type == "cpu" and mpi.started_by_ours(launch) else "gloo"


def _bucket_size(mebibytes: float | None, transport: str) -> dict[str, Any]:
    """Over MPI no small first one, which torch has by default: who computes waits for whoever sends it early."""
    if mebibytes is None:
        return {"bucket_cap_mb": SIZE} if transport == "mpi" else {}
    return {"bucket_cap_mb": mebibytes}


def _no_buffers_in_forward() -> dict[str, Any]:
    """No broadcast of buffers in the forward (the start still synchronises them), by the name this torch has for it."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {name: False for name in ("forward_sync_buffers", "broadcast_buffers") if name in names and (
        name == "forward_sync_buffers" or "forward_sync_buffers" not in names)}  # fmt: skip
