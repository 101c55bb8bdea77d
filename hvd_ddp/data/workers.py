"""Processes that read samples while the rank trains."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from hvd_ddp.data.items import Piece, Reader, Request
from hvd_ddp.errors import HvdDDPError

log = logging.getLogger(__name__)

SHARED = "/dev/shm"
_SIGNALS = {
    getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "HUP", "USR1", "USR2", "ALRM", "URG", "CONT")
}  # that schedulers and terminals send to every process of a job: what they mean is for the rank to say
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


class Answer(Protocol):
    """A piece that is, or will be, there."""

    def result(self) -> Piece: ...


class Workers(Protocol):
    """Who reads requests, `depth` of them ahead."""

    depth: int

    def start(self) -> None: ...

    def submit(self, request: Request) -> Answer: ...

    def close(self) -> None: ...


class Here:
    """No workers: this process reads, when the answer is asked for."""

    depth = 1

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def start(self) -> None:
        """Nothing to start."""

    def submit(self, request: Request) -> Answer:
        return _Later(self._reader, request)

    def close(self) -> None:
        """Nothing to end."""


class _Later:
    def __init__(self, reader: Reader, request: Request) -> None:
        self._reader, self._request = reader, request

    def result(self) -> Piece:
        return self._reader(self._request)


class Processes:
    """`num` processes, kept over all epochs, each with a copy of the data set; they answer in shared memory.

    They are started anew, not forked, since MPI and threads do not survive a fork; they leave all signals to the rank,
    and die with it, however it dies. `size` is the bytes of an answer, `neighbours` the ranks of this host, which share
    its memory. Raises HvdDDPError where shared memory or descriptors are too few, or the data can't be sent.
    """

    def __init__(self, reader: Reader, num: int, *, size: int, neighbours: int) -> None:
        self.num, self.depth = num, 2 * num
        _check_shared_memory((self.depth + num) * size, neighbours, num)
        _check_descriptors(64 + 4 * num + 2 * self.depth, num)
        self._owner, self._processes = os.getpid(), list[BaseProcess]()
        try:
            # By value: multiprocessing's pickler would pass a descriptor for each tensor, which one worker can take.
            self._reader = pickle.dumps(reader)
        except Exception as error:
            names = ", ".join(f"`{part.name}`" for part in reader.parts if part is not None)
            raise HvdDDPError(
                f"The data {names} can't be sent to loader workers: `{' '.join(str(error).split())}`. "
                "Define its class and its functions at the top of a module, open files in __getitem__, or use "
                "--workers 0."
            ) from error
        self._pool: ProcessPoolExecutor | None = None

    def start(self) -> None:
        """Start them all, if they are not there, and wait for the first: it imports torch and the user's modules."""
        if self._pool is None:
            self._pool, ready = self._start()
            for future in ready:
                _Promise(self, future).result()

    def submit(self, request: Request) -> Answer:
        """Let one of them read it."""
        self.start()
        assert self._pool is not None
        return _Promise(self, self._pool.submit(_read, request))

    def _start(self) -> tuple[ProcessPoolExecutor, list[Future[None]]]:
        before = set(multiprocessing.active_children())
        with _signals_held():
            pool = ProcessPoolExecutor(
                self.num,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(os.getpid(), self._reader),
            )
            ready = [pool.submit(_nothing) for _ in range(self.num)]  # each starts one, for none is idle yet
        self._processes = [process for process in multiprocessing.active_children() if process not in before]
        return pool, ready

    def why_they_ended(self) -> HvdDDPError:
        """What became of the workers, when they are gone."""
        for process in self._processes:
            process.join(1)
        codes = [process.exitcode for process in self._processes if process.exitcode not in (None, 0, -signal.SIGTERM)]
        how = f"signal {-codes[0]}" if codes and codes[0] < 0 else f"exit code {codes[0] if codes else 'unknown'}"
        return HvdDDPError(
            f"A loader worker ended with {how}: the samples that it was to read are missing. What it printed stands "
            f"above; signal 7 means that `{SHARED}` is full, signal 9 mostly that the memory is. Use fewer --workers, "
            "or give the job more memory."
        )

    def close(self) -> None:
        """End them, at once: what they still read nobody needs."""
        if os.getpid() != self._owner:  # a fork of the rank that comes to its end
            return
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(5)
        self._pool, self._processes = None, []


class _Promise:
    def __init__(self, workers: Processes, future: Future[Any]) -> None:
        self._workers, self._future = workers, future

    def result(self) -> Any:
        try:
            return self._future.result()
        except BrokenProcessPool as error:
            raise self._workers.why_they_ended() from error


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Let processes that are started inside begin with all these signals blocked: there is no moment without care."""
    # multiprocessing's own process: it lets INT and TERM through when it is started, and later tells of semaphores that
    # the rank has left behind, though it also removes them.
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    resource_tracker.ensure_running()
    sys.warnoptions.pop()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check_shared_memory(needed: int, neighbours: int, num: int) -> None:
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(SHARED).free
        if needed * neighbours > free:
            raise HvdDDPError(
                f"`{SHARED}` has `{free / 1e6:.0f}` MB free, and {num} loader workers for each of {neighbours} ranks "
                f"here can hold `{needed * neighbours / 1e6:.0f}` MB there: they would die in mid-training. Use "
                "fewer --workers, a larger --accumulate, or a container with more shared memory (docker: --shm-size)."
            )


def _check_descriptors(needed: int, num: int) -> None:
    used = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard if hard != resource.RLIM_INFINITY else max(soft, used + needed)
    if used + needed > limit:
        raise HvdDDPError(
            f"This process may have `{limit}` files open, and {num} loader workers need `{used + needed}`: they could "
            "not hand over what they read. Raise the limit (ulimit -n), or use fewer --workers."
        )
    if used + needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + needed, hard))


# From here on: in a worker.

_reader: Reader
_failure: Exception | None = None


def _begin(parent: int, reader: bytes) -> None:
    """Become a worker of process `parent`."""
    global _reader, _failure
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that
        os._exit(1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        import torch

        torch.set_num_threads(1)
        _reader = pickle.loads(reader)
    except Exception as error:  # told by the first answer; raised here, it would be lost
        _failure = error


def _nothing() -> None:
    pass


def _read(request: Request) -> Any:
    if _failure is not None:
        raise HvdDDPError(
            f"A loader worker can't take up the data: `{_failure!r}`. Make its module importable from the working "
            "directory, or use --workers 0."
        )
    return _reader(request, shared=True)
