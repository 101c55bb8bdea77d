"""A tree of pictures, as ImageNet has it: train/CLASS/*.jpg and val/CLASS/*.jpg."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvd_ddp.data.arrays import Data
from hvd_ddp.data.hashing import uniform
from hvd_ddp.data.packed import Progress
from hvd_ddp.data.source import Source
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.outside import from_json, open_regular

if TYPE_CHECKING:
    from PIL.Image import Image

    from hvd_ddp.data.items import Sample

DEFAULT_SIZE = 224
MOST = 4096  # pixels a side
ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
# What those are: Pillow tells by the content, and would start Ghostscript for a PostScript file of any name.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
PARTS = ("train", "val")
# Of ImageNet's pictures, as torchvision's models use them, in pixel units.
MEAN = tuple(255 * value for value in (0.485, 0.456, 0.406))
STD = tuple(255 * value for value in (0.229, 0.224, 0.225))
_LISTERS = 16  # threads: on a parallel file system listing a folder is mostly waiting
_TRIES = 10
_OUTWARDS = re.compile(rb"(?:^|\0)/|(?:^|[\0/])\.\.(?:[\0/]|$)")
SHOWN = 5  # of the pictures that can't be read


def image_folder(name: str) -> Source:
    """`image_folder:SIZE`; `image_folder` alone is of 224 pixels a side. Raises HvdDDPError."""
    size = name.partition(":")[2] or str(DEFAULT_SIZE)
    if not size.isdecimal() or not 1 <= int(size) <= MOST:
        raise HvdDDPError(
            f"--data is `{name}`, which is not of the form image_folder:SIZE with a SIZE from 1 to {MOST}. Write for "
            f"example `image_folder:{DEFAULT_SIZE}`: pixels a side of what the model is shown."
        )
    about = (
        "train/CLASS/*.jpg and val/CLASS/*.jpg in --data-dir (or PNG, ...), shown as 3xSIZExSIZE; SIZE 224 if left out"
    )
    return Source.surveyed(about, _list, lambda data_dir, found: _open(name, int(size), data_dir, found), _verify)


class UnreadableError(HvdDDPError):
    """A picture that can't be decoded."""


class Pictures:
    """The pictures of one part. Training ones are cropped at random where `augment` says so.

    `paths` are the names below `root`, with a zero byte behind each; they stay one block of bytes, since a million
    Python strings would take 100 MB in every rank and every worker.
    """

    augments = True
    target_shape: tuple[int, ...] = ()
    target_dtype: np.dtype[Any] = np.dtype(np.int64)

    def __init__(self, root: Path, paths: bytes, targets: NDArray[np.int32], size: int) -> None:
        self.name, self._root, self._paths, self._targets, self.size = str(root), root, paths, targets, size
        self._ends = np.flatnonzero(np.frombuffer(paths, np.uint8) == 0)
        self.shape: tuple[int, ...] = (3, size, size)
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        assert len(self._ends) == len(targets)

    def __len__(self) -> int:
        return len(self._targets)

    def path(self, index: int) -> Path:
        """Where that picture is."""
        first = int(self._ends[index - 1]) + 1 if index else 0
        return self._root / os.fsdecode(self._paths[first : int(self._ends[index])])

    def read(self, index: int, number: int, *, augment: bool) -> Sample:
        """The picture as uint8 (3, size, size).

        With `augment` a random part of it, of 8 to 100 % of its area and 3:4 to 4:3 in shape, and half of them
        mirrored; else its middle, 7/8 of the shorter side (Szegedy et al. 2015, arXiv:1409.4842, section 6; the numbers
        as in torchvision's training recipes). Decoded from JPEG in a half, a quarter or an eighth of its size where
        that is still larger than needed. Raises UnreadableError with the name of the file.
        """
        from PIL import Image

        path = self.path(index)
        try:
            with open_regular(path) as file, Image.open(file, formats=FORMATS) as picture:
                box, mirrored = random_box(*picture.size, number) if augment else (middle_box(*picture.size), False)
                pixels = self._crop(picture, box)
        except Exception as error:  # Pillow's decoders raise whatever comes to them
            raise UnreadableError(
                f"`{path}` can't be read as a picture: `{type(error).__name__}: {error}`. Mend or remove it, or go on "
                "without such pictures with --skip-bad."
            ) from error
        return np.ascontiguousarray((pixels[:, ::-1] if mirrored else pixels).transpose(2, 0, 1)), int(
            self._targets[index]
        )

    def _crop(self, picture: Image, box: tuple[float, float, float, float]) -> NDArray[np.uint8]:
        """The part within `box` (left, top, right, bottom), in pixels: uint8 (size, size, 3)."""
        from PIL.Image import Resampling

        width, height = picture.size
        shrink = max(1.0, min(box[2] - box[0], box[3] - box[1]) / self.size)
        picture.draft("RGB", (math.ceil(width / shrink), math.ceil(height / shrink)))
        across, down = picture.size[0] / width, picture.size[1] / height
        right, bottom = min(box[2] * across, picture.size[0]), min(box[3] * down, picture.size[1])
        box = (box[0] * across, box[1] * down, right, bottom)
        pixels = picture.convert("RGB").resize((self.size, self.size), Resampling.BILINEAR, box)
        return np.asarray(pixels)


def random_box(width: int, height: int, number: int) -> tuple[tuple[int, int, int, int], bool]:
    """A random part of a picture, (left, top, right, bottom) in pixels, and whether to mirror it.

    Tries as torchvision does to find a shape that fits, and takes the largest in the middle else.
    """
    draws = iter(uniform(number, 4 * _TRIES + 1))
    mirrored = next(draws) < 0.5
    for _ in range(_TRIES):
        area = width * height * (0.08 + 0.92 * next(draws))
        ratio = (3 / 4) * (16 / 9) ** next(draws)
        across, down = next(draws), next(draws)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
            return (left, top, left + w, top + h), mirrored
    ratio = min(max(width / height, 3 / 4), 4 / 3)
    w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
    left, top = (width - w) // 2, (height - h) // 2
    return (left, top, left + max(1, w), top + max(1, h)), mirrored


def middle_box(width: int, height: int) -> tuple[float, float, float, float]:
    """The square in the middle with 7/8 of the shorter side."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return (left, top, left + side, top + side)


def _list(data_dir: Path | None) -> bytes:
    """A line of JSON with the classes and how many pictures each has, then the names of all, a zero byte after each."""
    if data_dir is None or not data_dir.is_dir():
        raise HvdDDPError(
            f"--data-dir is `{data_dir}`, which is no folder: there are no pictures. Give one that holds "
            "train/CLASS/*.jpg and val/CLASS/*.jpg."
        )
    classes = _classes(data_dir / PARTS[0])
    counts, names = [], []
    with ThreadPoolExecutor(_LISTERS) as threads:
        for part in PARTS:
            folders = _classes(data_dir / part)
            if strange := sorted(set(folders) - set(classes)):
                near = difflib.get_close_matches(strange[0], classes, 1)
                raise HvdDDPError(
                    f"`{data_dir / part}` has the class `{strange[0]}`, which `{data_dir / PARTS[0]}` has not: a model "
                    f"can't know it.{f' Did you mean `{near[0]}`?' if near else ''} Rename or remove that folder."
                )
            found = dict(
                zip(folders, threads.map(_pictures, (data_dir / part / name for name in folders)), strict=True)
            )
            counts.append([len(found.get(name, ())) for name in classes])
            names += [f"{name}/{file}" for name in classes for file in found.get(name, ())]
    header = json.dumps({"classes": classes, "counts": counts})
    return header.encode() + b"\n" + b"".join(os.fsencode(name) + b"\0" for name in names)


def _classes(folder: Path) -> list[str]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise HvdDDPError(
            f"`{folder}` can't be listed ({error.strerror}): its pictures are missing. Let --data-dir hold "
            "train/CLASS/*.jpg and val/CLASS/*.jpg."
        ) from error
    if not names:
        raise HvdDDPError(f"`{folder}` has no folders: each class needs one, with its pictures in it. Make them.")
    return names


def _pictures(folder: Path) -> list[str]:
    """Names below the folder of one class, sorted. Raises HvdDDPError if there are none."""
    found, left = [], [""]
    while left:
        below = left.pop()
        with contextlib.suppress(OSError), os.scandir(folder / below) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(os.path.join(below, entry.name))
                elif entry.name.lower().endswith(ENDINGS) and entry.is_file():  # or a link to one; no pipe
                    found.append(os.path.join(below, entry.name))
    if not found:
        raise HvdDDPError(
            f"`{folder}` has no picture ({', '.join(ENDINGS)}): nobody can learn that class. Fill or remove the folder."
        )
    return sorted(found)


def _open(name: str, size: int, data_dir: Path | None, found: bytes) -> Data:
    assert data_dir is not None
    header, _, names = found.partition(b"\n")
    facts = _facts(header, names, data_dir)
    num_classes = len(facts["classes"])
    parts, rest = [], names
    for part, counts in zip(PARTS, facts["counts"], strict=True):
        targets = np.repeat(np.arange(num_classes, dtype=np.int32), counts)
        here, rest = _split(rest, len(targets))
        parts.append(Pictures(data_dir / part, here, targets, size))
    return Data(name, parts[0], parts[1], num_classes, MEAN, STD)


def _facts(header: bytes, names: bytes, data_dir: Path) -> dict[str, Any]:
    """The line of JSON, if it fits the names and these stay within the folder: it may have come over the network."""
    try:
        facts: dict[str, Any] = from_json(header)
        counts = facts["counts"]
        assert len(facts["classes"]) > 0 and len(counts) == len(PARTS)
        assert all(len(row) == len(facts["classes"]) and all(type(n) is int and n >= 0 for n in row) for row in counts)
        assert sum(map(sum, counts)) == names.count(b"\0") and all(map(sum, counts))
        assert (not names or names.endswith(b"\0")) and not _OUTWARDS.search(names)
    except (AssertionError, ValueError, LookupError, TypeError) as error:
        raise HvdDDPError(f"What rank 0 has found in `{data_dir}` makes no sense on this rank. Start again.") from error
    return facts


def _verify(data: Data, progress: Progress) -> None:
    """Decode every picture. Raises HvdDDPError that names those that can't be."""
    bad: list[str] = []

    def decode(one: tuple[Pictures, int]) -> None:
        try:
            one[0].read(one[1], 0, augment=False)
        except UnreadableError as error:
            bad.append(str(error))

    pictures = [(part, index) for part in (data.train, data.eval) if isinstance(part, Pictures)
                for index in range(len(part))]  # fmt: skip
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # Pillow decodes without Python's lock
        for done, _ in enumerate(threads.map(decode, pictures), 1):
            progress("decoding", done, len(pictures))
    if bad:
        raise HvdDDPError(
            f"{len(bad)} of {len(pictures)} pictures can't be read: " + " ".join(sorted(bad)[:SHOWN])
            + (f" And {len(bad) - SHOWN} more." if len(bad) > SHOWN else "")
        )  # fmt: skip


def _split(names: bytes, count: int) -> tuple[bytes, bytes]:
    """The first `count` names, and the rest."""
    ends = np.flatnonzero(np.frombuffer(names, np.uint8) == 0)
    cut = int(ends[count - 1]) + 1 if count else 0
    return names[:cut], names[cut:]
