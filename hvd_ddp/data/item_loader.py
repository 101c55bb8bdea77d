"""Batches from samples that are read one at a time, ahead of time where there are workers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count

import numpy as np
import torch
from torch import Tensor

from hvd_ddp.data.items import Items, Piece, Request, Stream
from hvd_ddp.data.loader import Asked, Batch, blank
from hvd_ddp.data.preprocess import Preprocess
from hvd_ddp.data.sampler import share
from hvd_ddp.data.workers import Answer, Workers

log = logging.getLogger(__name__)


class _Loader:
    """What is common to samples by number and samples in a row: `part` is which of the workers' data sets."""

    def __init__(self, workers: Workers, part: int, samples: Items | Stream, preprocess: Preprocess) -> None:
        self._workers, self._part, self._preprocess = workers, part, preprocess
        self._stand_in = partial(blank, samples, 1, device=preprocess.device, dtype=preprocess.dtype)
        self._pinned = _Pinned() if preprocess.device.type == "cuda" else None

    def start(self) -> None:
        """Start the workers."""
        self._workers.start()

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def _requests(self, indices: np.ndarray, epoch: int, accumulate: int) -> list[Request]:
        shares = (indices[share(len(indices), number, accumulate)] for number in range(accumulate))
        return [Request(self._part, part, epoch) for part in shares]

    def _ahead(self, groups: Iterable[list[Request]]) -> Iterator[list[Answer]]:
        """The answers to each group in turn, as many requests ahead as the workers' depth says."""
        waiting, in_flight = deque[list[Answer]](), 0
        for group in groups:
            waiting.append([self._submit(request) for request in group])
            in_flight += len(group)
            while in_flight >= self._workers.depth:
                in_flight -= len(waiting[0])
                yield waiting.popleft()
        yield from waiting

    def _submit(self, request: Request) -> Answer:
        answer = self._workers.submit(request)
        return answer if self._pinned is None else self._pinned.after(answer)

    def _batch(self, piece: Piece, epoch: int) -> Batch:
        """On the device. A stand-in of zeros where nothing was read."""
        for what in piece.bad:
            log.warning("left out: %s", what)
        device, num = self._preprocess.device, len(piece.samples)
        if not num:
            return self._stand_in()._replace(num_samples=0, num_bad=len(piece.bad))
        raw = piece.inputs.to(device) if self._pinned is None else self._pinned.upload(piece.inputs, device)
        samples, targets = (torch.from_numpy(numbers).to(device) for numbers in (piece.samples, piece.targets))
        if self._part == 0 and self._preprocess.augments:
            inputs = self._preprocess.training(raw, torch.arange(num, device=device), samples, epoch)
        else:
            inputs = self._preprocess.evaluation(raw)
        return Batch(inputs, self._preprocess.targets(targets), num, len(piece.bad))


class _Pinned:
    """Memory that the GPU reads by itself, and a stream for it, beside the one that computes."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)  # pinning copies: not on the thread that trains
        self._copies = torch.cuda.Stream()

    def after(self, answer: Answer) -> Answer:
        def pin() -> Piece:
            piece = answer.result()
            return piece._replace(inputs=piece.inputs.pin_memory())

        return self._thread.submit(pin)

    def upload(self, inputs: Tensor, device: torch.device) -> Tensor:
        """A copy on the device that the present stream may use; nobody waits for it here."""
        with torch.cuda.stream(self._copies):
            there = inputs.to(device, non_blocking=True)
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(self._copies)
        there.record_stream(computing)
        return there


class ItemLoader(_Loader):
    """Batches of a data set whose samples are read by number."""

    def __init__(self, workers: Workers, part: int, items: Items, preprocess: Preprocess) -> None:
        super().__init__(workers, part, items, preprocess)
        self._num_samples = len(items)

    def steps(self, asked: Iterable[Asked], accumulate: int) -> Iterator[list[Batch]]:
        """The micro-batches of each step that is asked for."""
        epochs = deque[int]()

        def groups() -> Iterator[list[Request]]:
            for indices, epoch in asked:
                epochs.append(epoch)
                yield self._requests(indices, epoch, accumulate)

        for answers in self._ahead(groups()):
            epoch = epochs.popleft()
            yield [self._batch(answer.result(), epoch) for answer in answers]

    def evaluation_batches(self, *, rank: int, world_size: int, batch_size: int = 64) -> Iterator[Batch]:
        """This rank's share of the data set in order, without padding."""
        part = share(self._num_samples, rank, world_size)
        firsts = range(part.start, part.stop, batch_size)
        groups = ([self._request(first, min(first + batch_size, part.stop))] for first in firsts)
        return (self._batch(answer.result(), 0) for (answer,) in self._ahead(groups))

    def _request(self, first: int, last: int) -> Request:
        return Request(self._part, np.arange(first, last, dtype=np.int64), 0)


class StreamLoader(_Loader):
    """Batches of a data set whose samples come in a row; the workers are one at most, and read in that order."""

    def __init__(self, workers: Workers, part: int, stream: Stream, preprocess: Preprocess) -> None:
        super().__init__(workers, part, stream, preprocess)
        self.sharded = stream.sharded

    def pieces(
        self, epoch: int, start: int, *, global_batch: int, accumulate: int, rank: int, world_size: int
    ) -> Iterator[list[Piece]]:
        """What this rank has for each step from `start` on, without an end: what is empty lies behind the row's end."""
        mine = share(global_batch, rank, world_size)

        def groups() -> Iterator[list[Request]]:
            for step in count(start):
                first = step * (mine.stop - mine.start) if self.sharded else step * global_batch + mine.start
                places = np.arange(first, first + mine.stop - mine.start, dtype=np.int64)
                yield self._requests(places, epoch, accumulate)

        for answers in self._ahead(groups()):
            yield [answer.result() for answer in answers]

    def batches(self, pieces: list[Piece], epoch: int) -> list[Batch]:
        """The micro-batches of one step."""
        return [self._batch(piece, epoch) for piece in pieces]

    def evaluation_batches(self, *, rank: int, world_size: int, batch_size: int = 64) -> Iterator[Batch]:
        """This rank's samples: of its own row, or every `world_size`-th batch of the common one."""
        first, every = (0, 1) if self.sharded else (rank, world_size)
        starts = (batch_size * number for number in count(first, every))
        groups = ([Request(self._part, np.arange(start, start + batch_size, dtype=np.int64), 0)] for start in starts)
        for (answer,) in self._ahead(groups):
            piece = answer.result()
            if len(piece.samples):
                yield self._batch(piece, 0)
            if len(piece.samples) < batch_size:
                return
