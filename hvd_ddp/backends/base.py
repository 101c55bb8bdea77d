"""Backend: moves gradients and messages. It knows nothing of checkpoints, precision, data or learning rates."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from hvd_ddp.backends.sync_bn import synchronized
from hvd_ddp.config import PLAIN, Communication
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch, restore
from hvd_ddp.job.rendezvous import Meeting

Op = Literal["sum", "max", "min"]
T = TypeVar("T")
PIECE = 1 << 26  # bytes that broadcast_bytes moves at a time


class Backend(ABC):
    """Joins the ranks of one job. `with backend:` sets up and tears down; both may be done again.

    Attributes: `launch` (this rank's place), `device` (where this rank computes), `is_main` (rank 0), `transport`,
    `communication` (how gradients move).
    """

    name: ClassVar[str]
    changes_transport: ClassVar[bool] = True  # whether one process may use several, one after the other

    def __init__(
        self,
        meeting: Meeting,
        *,
        transport: str,
        device: torch.device,
        timeout: float,
        communication: Communication = PLAIN,
    ) -> None:
        self.meeting, self.launch = meeting, meeting.launch
        self.transport, self.device, self.timeout = transport, device, timeout
        self.communication = communication
        self.is_main = meeting.launch.rank == 0
        self.why, self.asked_for = "asked for", True  # why this backend, for the banner; whether the user named it
        meeting.lost_a_peer = self.lost_a_peer

    @classmethod
    @abstractmethod
    def choose_transport(cls, transport: str, launch: Launch, device: torch.device) -> str:
        """The transport that `auto` stands for; raises HvdDDPError where the one that is asked for can't work."""

    @classmethod
    @abstractmethod
    def check(cls, communication: Communication, transport: str, launch: Launch, device: torch.device) -> None:
        """Raise HvdDDPError for the first option that this backend can't do over that transport, with the reason."""

    @abstractmethod
    def setup(self) -> None:
        """Join the job."""

    @abstractmethod
    def teardown(self) -> None:
        """Leave the job, together with all other ranks."""

    def lost_a_peer(self, error: BaseException) -> bool:
        """Whether the end of another rank may be what raised this error here."""
        return False

    def __enter__(self) -> Backend:
        self.setup()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:  # after an error peers may be dead or elsewhere: nobody waits for them
            self.teardown()
        restore()

    @abstractmethod
    def prepare(
        self, model: nn.Module, optimizer: Optimizer, *, accumulate: int = 1, find_unused_parameters: bool = False
    ) -> tuple[nn.Module, Optimizer]:
        """Return both, wrapped: every rank starts from rank 0's parameters and buffers, gradients come out averaged
        (or combined as `communication` says).

        State of the optimizer is lost: load it afterwards. `accumulate` is the largest number of backward passes
        before a `synchronize`.
        """

    def sync_batchnorm(self, model: nn.Module) -> nn.Module:
        """The model with BatchNorm over the samples of all ranks, for `prepare`; parameters stay the same objects.

        Every rank then needs a sample in each forward. One rank has nothing to share; for several, HvdDDPError for a
        model that has no BatchNorm.
        """
        if self.launch.world_size == 1:
            return model
        if not any(isinstance(module, _BatchNorm) for module in model.modules()):
            raise HvdDDPError("--sync-bn: the model has no BatchNorm layer, so nothing would change. Leave it out.")
        return synchronized(model, self.all_reduce)

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Context for every micro-batch but the last of a step."""
        return nullcontext()

    @abstractmethod
    def synchronize(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Context in which gradients are averaged and complete: unscale, clip and step belong inside.

        Raises HvdDDPError with the names of parameters that got no gradient on this rank, unless
        `find_unused_parameters`; with it, those that no rank used have the gradient None.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """Reduce over ranks; a new tensor of the same shape, dtype and device. No "mean": integers would truncate."""

    @abstractmethod
    def all_reduce_(self, tensor: Tensor) -> None:
        """Sum over ranks in place, by the way that gradients take: for measurements."""

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_reduce(torch.zeros(1, device=self.device)).item()

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        """The bytes of rank `src`, on every rank. Others pass None."""
        mine = data if data is not None and self.launch.rank == src else b""
        size = int(self.all_reduce(torch.tensor([len(mine)], device=self.device)).item())
        pieces = []
        for start in range(0, size, PIECE):
            piece = _words(mine[start : start + PIECE], min(PIECE, size - start))
            pieces.append(_bytes(self.all_reduce(piece.to(self.device))))
        return b"".join(pieces)[:size]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s small object on every rank. What JSON can carry: no pickle ever comes over the network."""
        own = self.launch.rank == src
        return json.loads(self.broadcast_bytes(json.dumps(obj).encode() if own else None, src))

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's small object (what JSON can carry, of any type on any rank), in rank order."""
        mine = json.dumps(obj).encode()
        world_size, rank = self.launch.world_size, self.launch.rank
        sizes = torch.zeros(world_size, dtype=torch.int64, device=self.device)
        sizes[rank] = len(mine)
        sizes = self.all_reduce(sizes).cpu()
        rows = torch.zeros(world_size, -(-int(sizes.max()) // 4), dtype=torch.int32)
        rows[rank] = _words(mine, int(sizes.max()))
        rows = self.all_reduce(rows.to(self.device)).cpu()
        return [json.loads(_bytes(row)[:size]) for row, size in zip(rows, sizes.tolist(), strict=True)]

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if any raises HvdDDPError, all raise that of the lowest rank."""
        result, error = _attempt(work)
        errors = self.all_gather_object(error)
        for rank, message in enumerate(errors):
            if message is not None:
                everywhere = all(other == message for other in errors)
                raise HvdDDPError(message if everywhere else f"{message} (Rank {rank} says so.)")
        return result  # type: ignore[return-value]

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone; all ranks get its result (what JSON can carry) or raise its HvdDDPError."""
        answer: tuple[T, str | None] = self.broadcast_object(_attempt(work) if self.is_main else None)
        if answer[1] is not None:
            raise HvdDDPError(answer[1])
        return answer[0]

    def bytes_from_main(self, work: Callable[[], bytes]) -> bytes:
        """Like `on_main`, for bytes of any number."""
        data, error = _attempt(work) if self.is_main else (None, None)
        self.on_main(lambda: _raise(error))
        return self.broadcast_bytes(data)


def _words(data: bytes, size: int) -> Tensor:
    """Bytes as int32, filled up with zeros to `size` bytes: Horovod reduces no uint8, and x + 0 is exact."""
    filled = bytearray(data.ljust(-(-size // 4) * 4, b"\0"))
    return torch.frombuffer(filled, dtype=torch.int32)


def _bytes(words: Tensor) -> bytes:
    return words.cpu().numpy().tobytes()


def _raise(error: str | None) -> None:
    if error is not None:
        raise HvdDDPError(error)


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return work(), None
    except HvdDDPError as error:
        return None, str(error)


def average_buffers(backend: Backend, model: nn.Module) -> None:
    """Average floating-point buffers (BatchNorm's running statistics) over ranks, in place.

    They follow each rank's own share of the data; evaluation and checkpoints want one set. Integer buffers (batches
    seen, fewer on a rank that had no sample in a step) take the largest. All of one dtype travel in one all_reduce.
    """
    if backend.launch.world_size == 1:
        return
    buffers = [buffer for buffer in model.buffers() if buffer.dtype != torch.bool and not buffer.is_complex()]
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        group = [buffer for buffer in buffers if buffer.dtype == dtype]
        together = torch.cat([buffer.detach().reshape(-1) for buffer in group])
        if dtype.is_floating_point:
            one = backend.all_reduce(together, "sum") / backend.launch.world_size
        else:
            one = backend.all_reduce(together, "max")
        for buffer, value in zip(group, one.split([buffer.numel() for buffer in group]), strict=True):
            buffer.copy_(value.view_as(buffer))
