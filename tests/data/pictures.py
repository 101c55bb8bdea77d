"""A tree of pictures in ImageNet's layout, of noise; the real ones can't be had without a network."""

from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed: int, width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Smooth blobs with some noise."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    noise = random.integers(-12, 13, (height, width, 3))
    return Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8)).convert(mode)


def tree(root: Path, *, classes: int = 3, train: int = 4, val: int = 2, size: tuple[int, int] = (60, 45)) -> Path:
    """train/cN/*.jpg and val/cN/*.jpg, each picture another."""
    for number, (part, count) in enumerate((("train", train), ("val", val))):
        for label in range(classes):
            folder = root / part / f"c{label}"
            folder.mkdir(parents=True)
            for index in range(count):
                seed = (number * classes + label) * 1000 + index
                picture(seed, *size).save(folder / f"{index:04d}.jpg", quality=90)
    return root
