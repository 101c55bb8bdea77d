"""A process group of torch.distributed over mpi4py, for tensors of CPUs.

Collectives are done one after the other by one thread, while backward goes on. What runs when one is complete (the
callbacks of DDP's communication hooks) runs on that thread as well, and may do collectives of its own there and then:
so their order is the same on every rank, however the threads race.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from hvd_ddp.backends import mpi

NAME = "hvd_ddp_mpi"  # "mpi" is torch's own, which its wheels do not have
MOST_BYTES = 1 << 30  # in one message: counts of MPI 3 are 32-bit
# Bytes for each rank that one reduction takes at a time. For a whole bucket MPI allocates as much again, and new pages
# cost more than the sum: 32 MB over 2 ranks of a node took 12 ms at once, 3 ms in parts of 4 MB. As they grow with the
# ranks, the parts stay large where MPI cuts them up among these.
BYTES_A_RANK = 2 << 20
SPIN = 0.0005  # seconds of waiting without sleep
HALVES: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}

Move = Callable[[], Sequence[Any]]  # does the collective; returns what the future holds


class MPIError(RuntimeError):
    """A collective failed. Through torch's futures only its text comes: see `lost_a_peer`."""


def register() -> None:
    """Make the group known to torch.distributed, under NAME."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: object) -> MPIGroup:
    MPI = mpi.mpi4py()
    world, ranks = MPI.COMM_WORLD, list(options.global_ranks_in_group)
    comm = world.Create_group(world.group.Incl(ranks)) if ranks else world.Dup()
    return MPIGroup(MPI, comm, options.timeout)


class _Work(dist.Work):
    """A collective that is done or under way. Not torch's own from a future, whose `wait` is silent about errors."""

    def __init__(self, done: Future[Any]) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._done.wait()
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def get_future(self) -> Future[Any]:
        return self._done


class MPIGroup(dist.ProcessGroup):
    """The collectives that DDP, SyncBatchNorm and the functions for objects use."""

    def __init__(self, MPI: Any, comm: Any, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self._MPI, self._comm, self._timeout = MPI, comm, timeout.total_seconds()
        self._numbers = _Numbers(MPI)
        # The thread's work: futures on which a collective waits.
        self._queue: SimpleQueue[Future[None] | None] = SimpleQueue()
        self._submitted = self._finished = 0  # each is written by one thread alone
        self._thread = threading.Thread(target=self._serve, name="mpi collectives", daemon=True)
        self._thread.start()
        mpi.unfinished.add(self)

    def shutdown(self) -> None:
        """Together with all ranks: finish what is under way, give the communicator back."""
        if self not in mpi.unfinished:
            return
        self._queue.put(None)
        self._thread.join()
        self._comm.Free()
        mpi.unfinished.discard(self)

    def getBackendName(self) -> str:
        return NAME

    # Collectives of torch.distributed

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        return self._submit(lambda: self._reduce_all(tensors, opts.reduceOp), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        def move() -> list[Tensor]:
            for tensor in tensors:
                with _flat(tensor) as flat:
                    for piece in flat.view(torch.uint8).split(MOST_BYTES):
                        self._comm.Bcast(self._bytes(piece), root=opts.rootRank)
            return tensors

        return self._submit(move, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        def move() -> list[Tensor]:
            everywhere = [tensor.detach().clone() for tensor in tensors]
            self._reduce_all(everywhere, opts.reduceOp)
            if self._comm.rank == opts.rootRank:
                for tensor, result in zip(tensors, everywhere, strict=True):
                    tensor.detach().copy_(result)
            return tensors

        return self._submit(move, opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> dist.Work:  # type: ignore[override]
        def move() -> list[Tensor]:
            self._gather(output, input)
            return [output]

        return self._submit(move, opts)

    all_gather_single = _allgather_base  # type: ignore[assignment]

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        def move() -> list[list[Tensor]]:
            for parts, input in zip(outputs, inputs, strict=True):
                rows = input.new_empty(self._comm.size, *input.shape)
                self._gather(rows, input)
                _copy(rows, parts)
            return outputs

        return self._submit(move, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        def move() -> list[list[Tensor]]:
            is_root = self._comm.rank == opts.rootRank
            for number, input in enumerate(inputs):
                rows = input.new_empty(self._comm.size if is_root else 0, *input.shape)
                self._comm.Gather(
                    self._bytes(input.detach().contiguous()), self._bytes(rows) if is_root else None, opts.rootRank
                )
                if is_root:
                    _copy(rows, outputs[number])
            return outputs

        return self._submit(move, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:  # type: ignore[override]
        def move() -> list[Tensor]:
            is_root = self._comm.rank == opts.rootRank
            for number, output in enumerate(outputs):
                rows = torch.stack(inputs[number]) if is_root else output.new_empty(0)
                mine = torch.empty_like(output, memory_format=torch.contiguous_format)
                self._comm.Scatter(self._bytes(rows) if is_root else None, self._bytes(mine), opts.rootRank)
                output.detach().copy_(mine)
            return outputs

        return self._submit(move, opts)

    def barrier(self, opts: Any) -> dist.Work:  # type: ignore[override]
        return self._submit(lambda: [], opts)  # they meet before every collective

    # How they are done

    def _submit(self, move: Move, opts: Any) -> dist.Work:
        """Do it here and now where the caller would only wait and nothing is under way, else on the thread."""
        if threading.current_thread() is self._thread or not (opts.asyncOp or self._submitted != self._finished):
            done: Future[Any] = Future()
            done.set_result(self._perform(move))
            return _Work(done)
        self._submitted += 1
        turn: Future[None] = Future()
        # By way of `then`, for an exception in it reaches all who wait, also in C++; Future.set_exception does not.
        done = turn.then(lambda _: self._perform(move))
        self._queue.put(turn)
        return _Work(done)

    def _serve(self) -> None:
        while (turn := self._queue.get()) is not None:
            turn.set_result(None)  # the collective, and what others have hung on it
            self._finished += 1

    def _perform(self, move: Move) -> Sequence[Any]:
        try:
            self._meet()
            return move()
        except self._MPI.Exception as error:
            raise MPIError(f"MPI gave up a collective: {error}") from error

    def _meet(self) -> None:
        """Wait until every rank is here, without taking the core from those who compute.

        MPI's own waiting spins. After this nobody waits long: the collective itself may be the fast, blocking one.
        """
        request, began = self._comm.Ibarrier(), time.monotonic()
        while not request.Test():
            waited = time.monotonic() - began
            if waited < SPIN:
                os.sched_yield()
            elif waited > self._timeout:
                raise MPIError(f"the other ranks did not come to a collective within {self._timeout:.0f} s")
            else:
                time.sleep(min(waited / 16, 0.001))

    def _reduce_all(self, tensors: list[Tensor], op: Any) -> list[Tensor]:
        name = "SUM" if (average := op == dist.ReduceOp.AVG) else op.op.name
        for tensor in tensors:
            kind, operation = self._numbers.kind_and_operation(tensor.dtype, name)
            with _flat(tensor) as flat:
                for piece in flat.split(BYTES_A_RANK * self._comm.size // tensor.itemsize):
                    self._comm.Allreduce(self._MPI.IN_PLACE, [self._memory(piece), kind], operation)
                if average:
                    flat /= self._comm.size
        return tensors

    def _gather(self, output: Tensor, input: Tensor) -> None:
        with _flat(output) as flat:
            self._comm.Allgather(self._bytes(input.detach().contiguous()), self._bytes(flat))

    def _memory(self, tensor: Tensor) -> Any:
        return self._MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def _bytes(self, tensor: Tensor) -> list[Any]:
        return [self._memory(tensor), self._MPI.BYTE]


@contextmanager
def _flat(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in one dimension; what is done to it is done to the tensor, however it lies in memory."""
    dense = tensor.detach().contiguous()
    yield dense.view(-1)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)


def _copy(rows: Tensor, parts: Sequence[Tensor]) -> None:
    for row, part in zip(rows, parts, strict=True):
        part.detach().copy_(row)


class _Numbers:
    """torch's types and operations as MPI's."""

    def __init__(self, MPI: Any) -> None:
        self._MPI = MPI
        self._kinds = {
            torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, torch.uint8: MPI.UINT8_T, torch.int8: MPI.INT8_T,
            torch.int16: MPI.INT16_T, torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T,
        }  # fmt: skip
        self._operations = {
            "SUM": MPI.SUM, "PRODUCT": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX,
            "BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR,
        }  # fmt: skip

    def kind_and_operation(self, dtype: torch.dtype, name: str) -> tuple[Any, Any]:
        """Raises MPIError for what can't be reduced."""
        if dtype in (torch.float16, torch.bfloat16) and name in HALVES:
            return self._MPI.INT16_T, _half(dtype, name)
        if dtype not in self._kinds or name not in self._operations:
            raise MPIError(f"no {name} of `{dtype}`")
        return self._kinds[dtype], self._operations[name]


@functools.cache
def _half(dtype: torch.dtype, name: str) -> Any:
    """An operation of MPI on 16-bit floats, which it does not know: they travel as integers."""

    def combine(theirs: Any, mine: Any, _: Any) -> None:
        result = torch.frombuffer(mine, dtype=dtype)
        HALVES[name](result, torch.frombuffer(theirs, dtype=dtype), out=result)

    return mpi.mpi4py().Op.Create(combine, commute=True)
