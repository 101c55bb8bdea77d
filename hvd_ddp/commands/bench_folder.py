"""bench folder: pictures a second that a rank and its workers make ready for training, out of a tree of JPEG files."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_ddp.commands.bench import Row, show
from hvd_ddp.commands.options import command_line
from hvd_ddp.errors import FINISHED

SIZE = 224
CLASSES, PER_CLASS = 8, 40
MADE = (500, 375)  # width and height, about what ImageNet's pictures have


@dataclass(frozen=True)
class Options:
    """Measure how many pictures a second a rank decodes, crops at random to 224x224, flips and normalises to float32.

    hvd_ddp is the loader as train uses it; torchvision its ImageFolder and v2 transforms in torch's DataLoader, with as
    many workers. They take turns; seconds are those of the clock.
    """

    data_dir: Path | None = None
    """Folder with train/CLASS/*.jpg and val/CLASS/*.jpg. None: 320 made ones of 500x375, in a temporary folder."""
    workers: int = 2
    """Worker processes."""
    batch: int = 32
    """Pictures a batch."""
    batches: int = 12
    """Batches of each turn."""
    repeats: int = 7
    """Turns of each; the median counts."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers with which nothing is measured."""
        if min(self.batch, self.batches, self.repeats, self.workers) < 1:
            raise ValueError(
                f"--batch is `{self.batch}`, --batches `{self.batches}`, --repeats `{self.repeats}`, --workers "
                f"`{self.workers}`: nothing would be measured. Give whole numbers from 1 up."
            )


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp bench folder`."""
    options = command_line(Options, arguments, "bench folder")
    rows = measure(options)
    turns = f"{options.repeats} turns of {options.batches} batches of {options.batch}"
    title = f"pictures of {SIZE}x{SIZE}, {options.workers} workers, {turns}"
    show(rows, title=title, as_json=options.json)
    return FINISHED


def measure(options: Options) -> list[Row]:
    """Rows hvd_ddp and torchvision, in pictures a second."""
    with contextlib.ExitStack() as stack:
        folder = options.data_dir
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            make_pictures(folder)
        makers = {
            "hvd_ddp": stack.enter_context(_ours(folder, options)),
            "torchvision": stack.enter_context(_theirs(folder, options)),
        }
        figures: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(options.repeats):
            for name, batches in makers.items():
                figures[name].append(_speed(batches, options))
    return [Row(name, "images_per_second", values) for name, values in figures.items()]


def _speed(batches: Iterator[Any], options: Options) -> float:
    for _ in range(2 * options.workers + 1):  # those that were ready before it
        next(batches)
    began = time.perf_counter()
    for _ in range(options.batches):
        next(batches)
    return options.batches * options.batch / (time.perf_counter() - began)


@contextlib.contextmanager
def _ours(folder: Path, options: Options) -> Iterator[Iterator[Any]]:
    """float32 (n, 3, 224, 224), for ever."""
    import torch

    from hvd_ddp.config import TrainConfig
    from hvd_ddp.data.datasets import load
    from hvd_ddp.data.feed import Place, Rank, feed

    config = TrainConfig(augment="standard", global_batch=options.batch, workers=options.workers)
    data = load(f"image_folder:{SIZE}", folder)
    mine = feed(
        config, data, Rank(0, 1, 1), device=torch.device("cpu"), dtype=torch.float32, agree=lambda counts: counts
    )
    with contextlib.closing(mine):
        yield (batch.inputs for step in mine.steps(Place(), 10**9) for batch in step.micros)


@contextlib.contextmanager
def _theirs(folder: Path, options: Options) -> Iterator[Iterator[Any]]:
    """The same by torchvision: its training recipe for ImageNet."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    from hvd_ddp.data.image_folder import MEAN, STD

    transform = v2.Compose([
        v2.RandomResizedCrop(SIZE),
        v2.RandomHorizontalFlip(),
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([value / 255 for value in MEAN], [value / 255 for value in STD]),
    ])  # fmt: skip
    loader: Any = DataLoader(
        ImageFolder(str(folder / "train"), transform),
        batch_size=options.batch,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=True,
        multiprocessing_context="spawn",
    )
    yield (inputs for inputs, _ in itertools.chain.from_iterable(iter(loader) for _ in itertools.count()))
    del loader  # ends its workers


def make_pictures(folder: Path) -> None:
    """train/CLASS/*.jpg and val/CLASS/*.jpg: smooth colours with some noise, about 100 kB each."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for part, count in (("train", PER_CLASS), ("val", 1)):
        for label in range(CLASSES):
            (folder / part / f"class{label}").mkdir(parents=True)
            for index in range(count):
                coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
                smooth = np.asarray(coarse.resize(MADE, Image.Resampling.BICUBIC)).astype(np.int16)
                pixels = (smooth + random.integers(-20, 21, smooth.shape)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / f"class{label}" / f"{index:04d}.jpg", quality=90)
