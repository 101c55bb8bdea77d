"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), through torchvision's classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hvd_ddp.data.arrays import ArrayDataset, Data
from hvd_ddp.data.folder import translated
from hvd_ddp.data.source import Source, fetch
from hvd_ddp.errors import HvdDDPError


def _torchvision(name: str) -> Any:
    from torchvision import datasets  # 1.4 s

    return {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]


def read_cifar(name: str, data_dir: Path | None) -> Data:
    """50,000 train and 10,000 eval images of 3x32x32, as uint8 arrays.

    The files are pickles. They are unpickled by torchvision and only when each has the MD5 that its authors published:
    that is all the trust there is. Raises HvdDDPError for files that are missing or have another one.
    """
    if data_dir is None:
        raise HvdDDPError(
            f"Data set `{name}` is read from files, and no folder was given. Use --data-dir DIR with a folder that "
            f"holds them, or make one: `python -m hvd_ddp data prepare {name} --data-dir DIR`."
        )
    kind = _torchvision(name)
    _verify(kind, name, data_dir)
    train, evaluation = (_part(kind(data_dir, train=train)) for train in (True, False))
    try:
        return Data.measure(name, train, evaluation, num_classes=int(name.removeprefix("cifar")))
    except ValueError as error:
        raise HvdDDPError(
            f"The files of `{name}` in `{data_dir}` do not fit together: {error}. Fetch them again."
        ) from error


def _verify(kind: Any, name: str, data_dir: Path) -> None:
    """Compare all files with their published checksums, before anything is unpickled."""
    from torchvision.datasets.utils import check_integrity

    again = (
        f"On a machine with a network `python -m hvd_ddp data prepare {name} --data-dir DIR` fetches it; on one "
        f"without, put `{kind.filename}` (from {kind.url}) into DIR first."
    )
    folder = data_dir / kind.base_folder
    for file, checksum in [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]:
        try:
            if not (folder / file).is_file():
                raise HvdDDPError(f"Data set `{name}` lacks `{folder / file}`: there is nothing to train on. {again}")
            fits = check_integrity(folder / file, checksum)
        except OSError as error:
            raise HvdDDPError(f"`{folder / file}` can't be read ({error.strerror}). Make it readable.") from error
        if not fits:
            raise HvdDDPError(
                f"`{folder / file}` does not have the published MD5 `{checksum}`: it is cut short, damaged, swapped "
                f"or of another origin, and is not unpickled. Remove it and fetch the data again. {again}"
            )


def _part(dataset: Any) -> ArrayDataset:
    images = np.ascontiguousarray(dataset.data.transpose(0, 3, 1, 2))  # torchvision has (N, H, W, C)
    return ArrayDataset(images, np.array(dataset.targets, dtype=np.int64))


def _files(name: str, data_dir: Path) -> list[Path]:
    kind = _torchvision(name)
    folder = data_dir / kind.base_folder
    names = [*(file for file, _ in [*kind.train_list, *kind.test_list]), kind.meta["filename"]]
    paths = [folder / file for file in names]
    return paths if all(path.is_file() for path in paths) else []


def _download(name: str, data_dir: Path) -> None:
    """Fetch and unpack the archive, or only unpack it where it is there already. Its MD5 is checked first."""
    from torchvision.datasets.utils import check_integrity, extract_archive

    kind = _torchvision(name)
    archive = data_dir / kind.filename
    if not archive.is_file():
        fetch(kind.url, archive, kind.tgz_md5)
    if not check_integrity(archive, kind.tgz_md5):
        raise HvdDDPError(
            f"`{archive}` does not have the published MD5 `{kind.tgz_md5}`: it is cut short, damaged or of another "
            f"origin, and is not unpacked. Remove it and fetch it again from {kind.url}."
        )
    with translated(data_dir / kind.base_folder):
        extract_archive(str(archive), str(data_dir))


def cifar(name: str) -> Source:
    """The source of that name."""
    return Source(
        about=f"50,000 + 10,000 images of 3x32x32, {name.removeprefix('cifar')} classes; downloaded by data prepare",
        read=lambda data_dir: read_cifar(name, data_dir),
        files=lambda data_dir: _files(name, data_dir),
        download=lambda data_dir: _download(name, data_dir),
    )
