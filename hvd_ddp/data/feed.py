"""What a rank is fed: its batches of each step, from any step of any epoch on, and those for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, tee
from typing import Any, NamedTuple, Protocol, cast

import torch

from hvd_ddp.config import TrainConfig
from hvd_ddp.data.arrays import ArrayDataset, Data
from hvd_ddp.data.augment import choose
from hvd_ddp.data.item_loader import ItemLoader, StreamLoader
from hvd_ddp.data.items import Items, Part, Piece, Reader, Stream
from hvd_ddp.data.loader import ArrayLoader, Asked, Batch
from hvd_ddp.data.preprocess import Preprocess
from hvd_ddp.data.sampler import GlobalBatchSampler
from hvd_ddp.data.workers import Here, Processes, Workers
from hvd_ddp.errors import HvdDDPError

MOST_WORKERS = 16  # where nobody says how many
BLOCK = 8  # steps of a stream for which the ranks agree at once on how many samples there are

Agree = Callable[[list[int]], list[int]]  # the sums over all ranks


class Place(NamedTuple):
    """How far training is in its data."""

    epoch: int = 0
    position: int = 0  # steps of this epoch that are done
    ended: bool = False  # the epoch has no more


class Step(NamedTuple):
    """What one rank does in one optimizer step."""

    micros: list[Batch]
    window: int  # samples that all ranks use in it
    place: Place  # after it


class Loader(Protocol):
    """Batches of one part of the data."""

    def steps(self, asked: Iterable[Asked], accumulate: int) -> Iterator[list[Batch]]: ...

    def evaluation_batches(self, *, rank: int, world_size: int) -> Iterator[Batch]: ...

    def start(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Rank:
    """Which of the job's ranks is fed."""

    rank: int
    world_size: int
    neighbours: int  # ranks of this host, with it


class Feed:
    """Samples in the exact order of (seed, epoch): the same on any number of ranks, across any number of stops."""

    def __init__(self, config: TrainConfig, rank: Rank, num_samples: int, train: Loader, evaluation: Any) -> None:
        self._config, self._rank, self._num_samples = config, rank, num_samples
        self._train, self._evaluation = train, evaluation
        self.steps_per_epoch = -(-num_samples // config.global_batch)

    def place(self, step: int, saved: dict[str, Any]) -> Place:
        """Where training is after `step` steps; `saved` is what `to_save` made of it then."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return Place(epoch, position) if position or not step else Place(epoch - 1, self.steps_per_epoch, True)

    def to_save(self, place: Place) -> dict[str, Any]:
        """Plain types for a checkpoint."""
        return place._asdict()

    def epochs(self, place: Place) -> float:
        """Epochs that are done."""
        return place.epoch + place.position / self.steps_per_epoch

    def steps(self, place: Place, num: int) -> Iterator[Step]:
        """The `num` steps that follow on `place`."""
        asked, order = tee(islice(self._order(place), num))
        loaded = self._train.steps(((indices, after.epoch) for indices, _, after in asked), self._config.accumulate)
        for (_, window, after), micros in zip(order, loaded, strict=True):
            yield Step(micros, window, after)

    def _order(self, place: Place) -> Iterator[tuple[Any, int, Place]]:
        """This rank's samples, int64 (n,), the samples of all ranks, and the place after it, of each step."""
        epoch, position, rank = place.epoch + place.ended, 0 if place.ended else place.position, self._rank
        while True:
            sampler = GlobalBatchSampler(
                self._num_samples, self._config.global_batch,
                rank=rank.rank, world_size=rank.world_size, seed=self._config.seed, epoch=epoch, start=position,
            )  # fmt: skip
            for indices, window in sampler:
                position += 1
                yield indices, window, Place(epoch, position, position == self.steps_per_epoch)
            epoch, position = epoch + 1, 0

    def evaluation_batches(self) -> Iterator[Batch]:
        """This rank's part of the evaluation set."""
        batches: Iterator[Batch] = self._evaluation.evaluation_batches(
            rank=self._rank.rank, world_size=self._rank.world_size
        )
        return batches

    def start(self) -> None:
        """Start the workers, if there are some: it takes seconds."""
        self._train.start()
        self._evaluation.start()

    def close(self) -> None:
        """End the workers, if there are some."""
        self._train.close()
        self._evaluation.close()


class StreamFeed(Feed):
    """Samples in the order in which a stream has them. An epoch ends for all ranks when the longest stream ends.

    A rank whose stream has ended takes part with weight zero meanwhile: no sample is left out, and a step is the mean
    over those that there are. Every BLOCK steps the ranks agree on how many that will be.
    """

    def __init__(self, config: TrainConfig, rank: Rank, train: StreamLoader, evaluation: Any, agree: Agree) -> None:
        super().__init__(config, rank, 0, cast(Loader, train), evaluation)
        self._stream, self._agree = train, agree

    def place(self, step: int, saved: dict[str, Any]) -> Place:
        """Where training was when that was saved. Raises HvdDDPError where other ranks' streams begin elsewhere."""
        place = Place(**{name: value for name, value in saved.items() if name != "world_size"})
        if self._stream.sharded and place.position and not place.ended and saved["world_size"] != self._rank.world_size:
            raise HvdDDPError(
                f"The checkpoint was written in the middle of an epoch by `{saved['world_size']}` ranks, each with a "
                f"stream of its own; {self._rank.world_size} ranks have other streams, samples would be lost or seen "
                f"twice. Go on with {saved['world_size']} ranks, or return a data set without `shard`."
            )
        return place

    def to_save(self, place: Place) -> dict[str, Any]:
        return {**place._asdict(), "world_size": self._rank.world_size}

    def epochs(self, place: Place) -> float:
        return place.epoch + place.ended

    def steps(self, place: Place, num: int) -> Iterator[Step]:
        return islice(self._steps(place), num)

    def _steps(self, place: Place) -> Iterator[Step]:
        epoch, position = place.epoch + place.ended, 0 if place.ended else place.position
        while True:
            pieces = self._stream.pieces(
                epoch, position,
                global_batch=self._config.global_batch, accumulate=self._config.accumulate,
                rank=self._rank.rank, world_size=self._rank.world_size,
            )  # fmt: skip
            block = self._block(pieces)
            if not block:
                raise HvdDDPError(f"The stream of the training data has no sample in epoch {epoch}. Mend `__iter__`.")
            while block:
                *before, (last, window) = block
                for mine, samples in before:
                    position += 1
                    yield Step(self._stream.batches(mine, epoch), samples, Place(epoch, position))
                block = self._block(pieces)
                position += 1
                yield Step(self._stream.batches(last, epoch), window, Place(epoch, position, not block))
            epoch, position = epoch + 1, 0

    def _block(self, pieces: Iterator[list[Piece]]) -> list[tuple[list[Piece], int]]:
        """The next steps, with the samples that all ranks have in each; fewer, or none, at the end of the epoch."""
        mine = list(islice(pieces, BLOCK))
        windows = self._agree([sum(len(piece.samples) for piece in step) for step in mine])
        return [(step, window) for step, window in zip(mine, windows, strict=True) if window]


def feed(
    config: TrainConfig, data: Data, rank: Rank, *, device: torch.device, dtype: torch.dtype, agree: Agree
) -> Feed:
    """What feeds this rank with that data. Raises HvdDDPError where workers can't be had."""
    parts: tuple[Part, Part] = (data.train, data.eval)
    reader = Reader(
        tuple(None if isinstance(part, ArrayDataset) else part for part in parts),
        data.num_classes, config.seed, config.augment == "standard", config.skip_bad, rank.rank, rank.world_size,
    )  # fmt: skip
    common: Workers | None = None  # the two parts share processes, where order does not matter
    loaders: list[Any] = []
    for number, part in enumerate(parts):
        augment = choose(config.augment, data, seed=config.seed) if number == 0 else None
        form: dict[str, Any] = {"mean": data.mean, "std": data.std, "device": device, "dtype": dtype}
        if isinstance(part, ArrayDataset):
            loaders.append(ArrayLoader(part, augment, **form))
        elif isinstance(part, Stream):
            own = _workers(config, reader, rank, part, most=1)
            loaders.append(StreamLoader(own, number, part, Preprocess(augment, **form)))
        else:
            common = common or _workers(config, reader, rank, part, most=256)
            loaders.append(ItemLoader(common, number, part, Preprocess(augment, **form)))
    if data.num_train is None:
        return StreamFeed(config, rank, loaders[0], loaders[1], agree)
    return Feed(config, rank, data.num_train, loaders[0], loaders[1])


def _workers(config: TrainConfig, reader: Reader, rank: Rank, part: Items | Stream, *, most: int) -> Workers:
    num = config.workers
    if num is None:  # decoding pictures takes longer than most models; a folder of them can always be sent to workers
        num = min(MOST_WORKERS, torch.get_num_threads()) if part.augments else 0
    if num == 0:
        return Here(reader)
    samples = -(-config.global_batch // (rank.world_size * config.accumulate))
    size = max(samples, 64) * part.dtype.itemsize * int(torch.Size(part.shape).numel())
    return Processes(reader, min(num, most), size=size, neighbours=rank.neighbours)
