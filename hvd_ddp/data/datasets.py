"""Names of data sets -> data. A new one is a file beside this one and a line in DATASETS."""

from __future__ import annotations

import difflib
import logging
from pathlib import Path
from typing import Any

from hvd_ddp.data import packed
from hvd_ddp.data.arrays import ArrayDataset, Data
from hvd_ddp.data.cifar import cifar
from hvd_ddp.data.digits import load_digits
from hvd_ddp.data.fashion_mnist import download, find_files, load_fashion_mnist
from hvd_ddp.data.folder import CannotWriteError, only_one, translated
from hvd_ddp.data.image_folder import image_folder
from hvd_ddp.data.packed import DamagedPackError, Progress, silent
from hvd_ddp.data.source import Source
from hvd_ddp.data.synthetic import synthetic
from hvd_ddp.errors import HvdDDPError

__all__ = ["DATASETS", "ArrayDataset", "Data", "find", "load", "load_staged", "pack", "prepare", "stage"]

log = logging.getLogger(__name__)

DATASETS: dict[str, Source] = {
    "digits": Source("1,437 + 360 images of 1x8x8, 10 classes; in the package", load_digits, packs=False),
    "fashion_mnist": Source(
        "60,000 + 10,000 images of 1x28x28, 10 classes; downloaded by data prepare",
        load_fashion_mnist,
        files=find_files,
        download=download,
        train_packs=False,  # read in a second, often from a folder of the system
    ),
    "cifar10": cifar("cifar10"),
    "cifar100": cifar("cifar100"),
}
FORMS = {  # names with parameters, for `data list` and errors
    "image_folder:SIZE": image_folder("image_folder").about,
    "synthetic:CxHxW:CLASSES:SIZE": "noise with a pattern for each class, SIZE + SIZE/10 images; nothing to download",
    "module:factory": "your own: factory(data_dir) -> (train, eval) or (train, eval, num_classes)",
}


def find(name: str) -> Source:
    """What the name stands for. Raises HvdDDPError for an unknown one."""
    if name in DATASETS:
        return DATASETS[name]
    if name.partition(":")[0] == "synthetic":
        return synthetic(name)
    if name.partition(":")[0] == "image_folder":
        return image_folder(name)
    if ":" in name:
        from hvd_ddp.data.own import own  # imports torch

        return own(name)
    known = [*DATASETS, *(form.partition(":")[0] for form in FORMS if not form.startswith("module"))]
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1)
    guess = f" Did you mean `{near[0]}`?" if near else ""
    choices = ", ".join(f"`{choice}`" for choice in [*DATASETS, *FORMS])
    raise HvdDDPError(f"Data set `{name}` is unknown: nothing can be loaded.{guess} Use --data with one of {choices}.")


def load(name: str, data_dir: Path | None = None) -> Data:
    """The data set of that name; `data_dir` is where its files are, for those that need some.

    Mapped where its packed form is there, else read into memory; nothing is written. Raises HvdDDPError for an unknown
    name, and for files that are missing or damaged.
    """
    source = find(name)
    if source.packs and data_dir is not None:
        data = packed.load(packed.path_of(name, data_dir), name)
        if data is not None and not _outdated(name, data_dir, source):
            return data
    return source.read(data_dir)


def _outdated(name: str, data_dir: Path, source: Source) -> bool:
    """Whether the files that it was packed from are there, and are others now."""
    manifest = packed.read_manifest(packed.path_of(name, data_dir)) or {}
    return source.fingerprint(data_dir) not in ({}, manifest.get("sources"))


def pack(name: str, data_dir: Path | None) -> None:
    """Make the packed form for `load` to map, if train may and can: called once a job, before all ranks load."""
    source = find(name)
    if not (source.packs and source.train_packs) or data_dir is None or not data_dir.is_dir():
        return
    try:
        _pack(name, data_dir, source)
    except CannotWriteError as error:
        log.warning("%s Until then each rank reads `%s` into its own memory.", error, name)


def _pack(name: str, data_dir: Path, source: Source) -> None:
    path = packed.path_of(name, data_dir)
    if packed.read_manifest(path) and not _outdated(name, data_dir, source):
        return
    with only_one(path):
        if not packed.read_manifest(path) or _outdated(name, data_dir, source):
            packed.write(source.read(data_dir), path, sources=source.fingerprint(data_dir))


def prepare(name: str, data_dir: Path | None, progress: Progress = silent) -> tuple[Data, str]:
    """Download where that is needed, pack, verify; the data, and in words what was done. Raises HvdDDPError."""
    source = find(name)
    if not source.packs:
        data = source.read(data_dir)
        if source.verify is not None:
            source.verify(data, progress)
        return data, "read and checked; it has no packed form"
    if data_dir is None or not data_dir.is_dir():
        raise HvdDDPError(
            f"--data-dir is `{data_dir}`, which is no folder: the packed `{name}` has no place. "
            "Give an existing folder that you may write to."
        )
    path, done = packed.path_of(name, data_dir), "verified"
    if (lack := _lack(name, data_dir, source, progress)) is not None:
        with only_one(path):
            if (lack := _lack(name, data_dir, source, progress)) is not None:
                if source.download is not None and not source.files(data_dir):
                    source.download(data_dir)
                packed.write(source.read(data_dir), path, sources=source.fingerprint(data_dir), progress=progress)
                done = f"packed and verified ({lack})"
        packed.verify(path, progress)
    return _mapped(path, name), done


def _lack(name: str, data_dir: Path, source: Source, progress: Progress) -> str | None:
    """Why the packed form has to be made; None where it is there and verifies."""
    path = packed.path_of(name, data_dir)
    try:
        if packed.load(path, name) is None:
            return "it was not there"
        packed.verify(path, progress)
    except DamagedPackError as error:
        return f"the old one {error.fact}"
    return "its files had changed" if _outdated(name, data_dir, source) else None


def stage(name: str, data_dir: Path | None, directory: Path) -> None:
    """Bring the packed form to `directory`, on a disk of this node, and verify it; called by one rank of each node.

    Copied where it is packed in `data_dir`, else packed from the files there. Raises HvdDDPError.
    """
    source = find(name)
    if not source.packs:
        raise HvdDDPError(f"--stage copies packed data, and `{name}` has no packed form. Leave --stage out.")
    target = packed.path_of(name, directory)
    with translated(target):
        directory.mkdir(parents=True, exist_ok=True)
    origin = None
    if data_dir is not None and not _outdated(name, data_dir, source):
        origin = packed.read_manifest(packed.path_of(name, data_dir))
    with only_one(target):
        if _is_staged(target, origin, source.fingerprint(data_dir)):
            return
        if origin is not None and data_dir is not None:
            packed.copy(packed.path_of(name, data_dir), target)
        else:
            packed.write(source.read(data_dir), target, sources=source.fingerprint(data_dir))


def _is_staged(target: Path, origin: dict[str, Any] | None, sources: packed.Sources) -> bool:
    """Whether what an earlier start brought there is whole and still the same data."""
    try:
        manifest = packed.read_manifest(target)
        if manifest is None or (manifest.get("sources") != sources if origin is None else manifest != origin):
            return False
        packed.verify(target)
    except DamagedPackError as error:
        log.warning("The staged copy %s: it is made again.", error.fact)
        return False
    return True


def load_staged(name: str, directory: Path) -> Data:
    """What `stage` has brought there, memory-mapped."""
    return _mapped(packed.path_of(name, directory), name)


def _mapped(path: Path, name: str) -> Data:
    data = packed.load(path, name)
    if data is None:
        raise DamagedPackError(path, "is not there")
    return data
