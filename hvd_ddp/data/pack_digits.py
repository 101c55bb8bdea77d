"""Packs the UCI digits into digits.npz, the same bytes each time.

    python -m hvd_ddp.data.pack_digits SOURCE [OUTPUT]

SOURCE is `optdigits.tes` from the UCI repository, or the `digits.csv.gz` that scikit-learn ships: text, a line for each
picture, 64 pixels 0..16 and the class, separated by commas. DIGITS.md describes the split. Silent when all is well.
"""

import argparse
import gzip
import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NUM_TRAIN, NUM_EVAL, NUM_CLASSES = 1437, 360, 10


def read_source(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images uint8 (1797, 1, 8, 8) and targets int64 (1797,); ValueError when it is another file."""
    content = path.read_bytes()
    if content.startswith(b"\x1f\x8b"):
        content = gzip.decompress(content)
    rows = np.loadtxt(io.BytesIO(content), delimiter=",", dtype=np.int64, ndmin=2)
    if rows.shape != (NUM_TRAIN + NUM_EVAL, 65):
        raise ValueError(f"{path} holds {rows.shape}, not {NUM_TRAIN + NUM_EVAL} rows of 65 numbers")
    pixels, targets = rows[:, :64], rows[:, 64]
    if pixels.min() < 0 or pixels.max() > 16 or targets.min() < 0 or targets.max() >= NUM_CLASSES:
        raise ValueError(f"{path} holds pixels outside 0..16 or classes outside 0..9")
    return pixels.astype(np.uint8).reshape(-1, 1, 8, 8), targets.copy()


def split(images: NDArray[np.uint8], targets: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Indices of the train part and of the eval part.

    Pictures are ordered by the SHA-256 of class and pixels, so neither the order of the source nor any library's random
    numbers count. Each class gives its first pictures to eval, as many as its share of NUM_EVAL, rounded by largest
    remainder. Raises ValueError when a picture is in both parts.
    """
    keys = [
        hashlib.sha256(bytes([int(target)]) + image.tobytes()).digest()
        for image, target in zip(images, targets, strict=True)
    ]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    members = [[index for index in order if targets[index] == number] for number in range(NUM_CLASSES)]
    exact = [divmod(len(member) * NUM_EVAL, len(keys)) for member in members]
    by_remainder = sorted(range(NUM_CLASSES), key=lambda number: (-exact[number][1], number))
    rounded_up = set(by_remainder[: NUM_EVAL - sum(whole for whole, _ in exact)])
    chosen = {
        index for number, member in enumerate(members) for index in member[: exact[number][0] + (number in rounded_up)]
    }
    train = [index for index in order if index not in chosen]
    evaluation = [index for index in order if index in chosen]
    if {images[index].tobytes() for index in train} & {images[index].tobytes() for index in evaluation}:
        raise ValueError("a picture is in both parts")
    return train, evaluation


def pack(source: Path) -> bytes:
    """The content of digits.npz. Stored, not deflated: what deflate writes depends on the zlib."""
    images, targets = read_source(source)
    train, evaluation = split(images, targets)
    arrays = {
        "train_images": images[train],
        "train_targets": targets[train].astype("<i8"),
        "eval_images": images[evaluation],
        "eval_targets": targets[evaluation].astype("<i8"),
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o644 << 16  # else they follow the platform
            member = io.BytesIO()
            np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)
            archive.writestr(entry, member.getvalue())
    return packed.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description="Packs the UCI digits, the same bytes each time.")
    parser.add_argument("source", type=Path, help="optdigits.tes, or scikit-learn's digits.csv.gz")
    parser.add_argument("output", type=Path, nargs="?", default=Path(__file__).with_name("digits.npz"))
    options = parser.parse_args()
    options.output.write_bytes(pack(options.source))


if __name__ == "__main__":
    main()
