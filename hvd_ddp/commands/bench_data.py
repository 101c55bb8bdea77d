"""bench data: images a second that one core prepares for training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvd_ddp.commands.bench import Row, show
from hvd_ddp.commands.options import command_line
from hvd_ddp.errors import FINISHED

SHAPE = (3, 32, 32)
SAMPLES = 50_000  # as many as CIFAR has: 154 MB, more than caches hold
PADDING = 4


@dataclass(frozen=True)
class Options:
    """Measure how many images of 32x32x3 a second one thread crops, flips and normalises to float32.

    hvd_ddp is the loader as train uses it; torchvision its v2 transforms, one image at a time on tensors, their fastest
    form; limit only gathers, converts and normalises, in torch. They take turns, each with the same samples. Seconds
    are those in which the thread had its core, so that a busy machine spoils less.
    """

    batch: int = 256
    """Images a batch."""
    repeats: int = 7
    """Turns of each; the median counts."""
    seconds: float = 0.5
    """Seconds of CPU time of each turn."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers with which nothing is measured."""
        if not (1 <= self.batch <= SAMPLES and self.repeats >= 1 and self.seconds > 0):
            raise ValueError(
                f"--batch is `{self.batch}`, --repeats `{self.repeats}`, --seconds `{self.seconds}`: nothing would be "
                f"measured. Give a batch from 1 to {SAMPLES}, a repeat at least, and seconds above 0."
            )


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp bench data`."""
    options = command_line(Options, arguments, "bench data")
    rows = measure(options.batch, options.repeats, options.seconds)
    turns = f"{options.repeats} turns of {options.seconds:g} s of CPU time"
    title = f"images of 32x32x3, one thread, batches of {options.batch}, {turns}"
    show(rows, title=title, as_json=options.json)
    return FINISHED


def measure(batch: int, repeats: int, seconds: float) -> list[Row]:
    """Rows hvd_ddp, torchvision and limit, in that order, in images a second."""
    import numpy as np
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        order = np.random.default_rng(0).permutation(SAMPLES)
        starts = range(0, SAMPLES - batch + 1, batch)
        batches = [order[start : start + batch] for start in starts]
        makers = candidates()
        for make in makers.values():  # compiles, and touches every image
            make(order[:batch])
        figures: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(repeats):
            for name, make in makers.items():
                figures[name].append(speed(make, batches, seconds))
    finally:
        torch.set_num_threads(threads)
    return [Row(name, "images_per_second", values) for name, values in figures.items()]


def speed(make: Callable[[Any], Any], batches: list[Any], seconds: float) -> float:
    """Images a second of CPU time, over at least `seconds` of it."""
    began, number, images = time.process_time(), 0, 0
    while (now := time.process_time()) - began < seconds or not images:
        make(batches[number % len(batches)])
        images += len(batches[number % len(batches)])
        number += 1
    return images / (now - began)


def candidates() -> dict[str, Callable[[Any], Any]]:
    """What makes a float32 batch (n, 3, 32, 32) from indices, int64 (n,)."""
    import numpy as np
    import torch
    from torchvision.transforms import v2

    from hvd_ddp.data.arrays import ArrayDataset, channel_statistics
    from hvd_ddp.data.augment import Augmentation
    from hvd_ddp.data.loader import ArrayLoader

    images = np.random.default_rng(0).integers(0, 256, (SAMPLES, *SHAPE), dtype=np.uint8)
    dataset = ArrayDataset(images, np.zeros(SAMPLES, dtype=np.int64))
    mean, std = channel_statistics(images)
    augment = Augmentation(0, (PADDING, PADDING), flip=True)
    augmented, plain = (
        ArrayLoader(dataset, change, mean=mean, std=std, device="cpu", dtype=torch.float32)
        for change in (augment, None)
    )
    transform = v2.Compose([
        v2.RandomCrop(SHAPE[1:], padding=PADDING),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([value / 255 for value in mean], [value / 255 for value in std], inplace=True),
    ])  # fmt: skip
    tensor = torch.from_numpy(images)
    return {
        "hvd_ddp": lambda indices: augmented.micro_batches(indices, 1)[0].inputs,
        "torchvision": lambda indices: torch.stack([transform(tensor[index]) for index in indices.tolist()]),
        "limit": lambda indices: plain.micro_batches(indices, 1)[0].inputs,
    }
