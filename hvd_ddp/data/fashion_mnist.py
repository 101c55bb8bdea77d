"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017), read from its four IDX files."""

from pathlib import Path

import numpy as np

from hvd_ddp.data.arrays import ArrayDataset, Data
from hvd_ddp.data.folder import translated
from hvd_ddp.data.idx import read_idx
from hvd_ddp.data.source import fetch
from hvd_ddp.errors import HvdDDPError

_NUM_CLASSES = 10
_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "eval": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_FOLDERS = ("", "FashionMNIST/raw", "fashion_mnist", "fashion-mnist")  # the second is how torchvision lays it out
_SOURCES = (
    "On Debian and Ubuntu the package dataset-fashion-mnist brings them (then `--data-dir "
    "/usr/share/datasets/fashion-mnist`); torchvision's `FashionMNIST(DIR, download=True)` and the repository "
    "zalandoresearch/fashion-mnist on GitHub have them too."
)


def load_fashion_mnist(data_dir: Path | None) -> Data:
    """60,000 train and 10,000 eval images of 28x28 grey pixels, ten classes; subsets of it are read too.

    The files may be plain or .gz, in `data_dir` or in one of the usual folders below it, all four in the same.
    Raises HvdDDPError when they are missing, damaged, or do not fit each other.
    """
    if data_dir is None:
        raise HvdDDPError(
            "Data set `fashion_mnist` is read from files, and no folder was given. "
            f"Use --data-dir DIR with a folder that holds them. {_SOURCES}"
        )
    paths = _find(data_dir)
    train, evaluation = (_read_part(*(paths[name] for name in _FILES[part])) for part in ("train", "eval"))
    if train.images.shape[1:] != evaluation.images.shape[1:]:
        raise HvdDDPError(
            f"The images in `{paths[_FILES['train'][0]]}` are `{train.images.shape[2:]}` pixels, those in "
            f"`{paths[_FILES['eval'][0]]}` `{evaluation.images.shape[2:]}`: one model can't take both. "
            f"Use files of one data set. {_SOURCES}"
        )
    return Data.measure("fashion_mnist", train, evaluation, _NUM_CLASSES)


def find_files(data_dir: Path) -> list[Path]:
    """The four files; nothing where one is missing."""
    try:
        return list(_find(data_dir).values())
    except HvdDDPError:
        return []


def download(data_dir: Path) -> None:
    """Fetch the four files into DIR/FashionMNIST/raw, checked against their published MD5. Raises HvdDDPError."""
    from torchvision.datasets import FashionMNIST

    folder = data_dir / "FashionMNIST" / "raw"
    with translated(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, checksum in FashionMNIST.resources:
        fetch(FashionMNIST.mirrors[0] + name, folder / name, checksum)


def _find(data_dir: Path) -> dict[str, Path]:
    """Name -> path of the four files, from the first folder that has them all; the plain file before the .gz."""
    names = [name for part in _FILES.values() for name in part]
    folders = [data_dir / folder for folder in _FOLDERS]
    best: dict[str, Path] = {}
    for folder in folders:
        found = {name: path for name in names if (path := _plain_or_gz(folder / name)) is not None}
        if len(found) == len(names):
            return found
        best = max(best, found, key=len)
    missing = ", ".join(f"`{name}`" for name in names if name not in best)
    looked = ", ".join(f"`{folder}`" for folder in folders)
    raise HvdDDPError(
        f"Data set `fashion_mnist` lacks {missing} (plain or .gz); looked in {looked}: there is nothing to train on. "
        f"Give the folder that holds all four files with --data-dir DIR. {_SOURCES}"
    )


def _plain_or_gz(path: Path) -> Path | None:
    try:
        return next((p for p in (path, path.with_name(path.name + ".gz")) if p.is_file()), None)
    except OSError as error:
        raise HvdDDPError(
            f"Folder `{path.parent}` can't be searched: `{error}`. Make it readable, or give another --data-dir."
        ) from error


def _read_part(images_path: Path, labels_path: Path) -> ArrayDataset:
    images, labels = read_idx(images_path, "images"), read_idx(labels_path, "labels")
    if len(images) != len(labels):
        raise HvdDDPError(
            f"`{images_path}` holds `{len(images)}` images, `{labels_path}` `{len(labels)}` labels: which belong "
            f"together is unknown. Use files of one data set. {_SOURCES}"
        )
    if (highest := int(labels.max())) >= _NUM_CLASSES:
        raise HvdDDPError(
            f"`{labels_path}` holds the label `{highest}`; those of Fashion-MNIST are 0 to {_NUM_CLASSES - 1}: it is "
            f"damaged or of another data set. Fetch it again. {_SOURCES}"
        )
    return ArrayDataset(images[:, np.newaxis], labels.astype(np.int64))
