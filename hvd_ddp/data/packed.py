"""Packed data: a folder of memory-mapped arrays and a manifest, whose pages all ranks of a node share.

`<data_dir>/<name>.packed/` holds train_images.npy, train_targets.npy, eval_images.npy, eval_targets.npy (uint8
(N, C, H, W) and int64 (N,)) and manifest.json: format, name, number of classes, mean and std, what it was made from,
and dtype, shape, size and SHA-256 of each file. It is there whole or not at all (`folder.py`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_ddp.data.arrays import ArrayDataset, Data, check_targets
from hvd_ddp.data.folder import new_folder
from hvd_ddp.durable import write_new
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.outside import from_json, open_regular, read

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = ("train_images", "train_targets", "eval_images", "eval_targets")
PIECE = 1 << 23  # bytes at a time

Progress = Callable[[str, int, int], None]  # what is done, bytes done, bytes in all
Sources = dict[str, list[int]]  # file -> size and time of change


def silent(what: str, done: int, total: int) -> None:
    """No progress bar."""


class DamagedPackError(HvdDDPError):
    """A packed folder is not what was once written."""

    def __init__(self, path: Path, fact: str) -> None:
        self.fact = fact
        super().__init__(
            f"Packed data `{path}` {fact}: it is damaged or was changed. Make it again with `python -m hvd_ddp data "
            f"prepare NAME --data-dir DIR`, or remove the folder."
        )


def path_of(name: str, directory: Path) -> Path:
    """Where the packed form of that data set is, or would be."""
    return directory / f"{name.replace(':', '-')}.packed"


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of the packed folder; None if there is no such folder. Raises DamagedPackError."""
    try:
        content = read(path / MANIFEST)
    except FileNotFoundError:
        if path.exists():
            raise DamagedPackError(path, f"has no `{MANIFEST}`") from None
        return None
    except OSError as error:
        raise DamagedPackError(path, f"can't be read ({error.strerror})") from error
    try:
        manifest = from_json(content)
        if manifest["format"] != FORMAT:
            raise DamagedPackError(path, f"has the format `{manifest['format']}`, this version reads `{FORMAT}`")
        arrays = manifest["arrays"]
        if set(arrays) != set(ARRAYS) or not all(type(arrays[name]["bytes"]) is int for name in ARRAYS):
            raise ValueError
        if not all(isinstance(arrays[name]["sha256"], str) for name in ARRAYS):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedPackError(path, f"has a `{MANIFEST}` that is none") from None
    return manifest  # type: ignore[no-any-return]


def load(path: Path, name: str) -> Data | None:
    """The data set in that folder, memory-mapped; None if there is no such folder.

    Sizes, shapes and classes are checked, the hashes are not: see `verify`. Raises DamagedPackError.
    """
    manifest = read_manifest(path)
    if manifest is None:
        return None
    if manifest.get("name") != name:
        raise DamagedPackError(path, f"holds `{manifest.get('name')}`, not `{name}`")
    arrays = [_map(path, array, manifest["arrays"][array]) for array in ARRAYS]
    try:
        train, evaluation = ArrayDataset(*arrays[:2]), ArrayDataset(*arrays[2:])
        num_classes, mean, std = int(manifest["num_classes"]), tuple(manifest["mean"]), tuple(manifest["std"])
        data = Data(name, train, evaluation, num_classes, mean, std)
        for part in (train, evaluation):
            check_targets(name, part, num_classes)
        if not len(mean) == len(std) == data.num_channels or not all(map(_is_number, (*mean, *std))) or min(std) <= 0:
            raise ValueError("mean and std do not fit the images")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedPackError(path, f"does not fit together ({error})") from error
    return data


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and -1e30 < value < 1e30


def _map(path: Path, array: str, entry: dict[str, Any]) -> NDArray[Any]:
    file = path / f"{array}.npy"
    try:
        with open_regular(file) as opened:  # no pipe, which the next would wait for
            size = os.fstat(opened.fileno()).st_size
        if size != entry["bytes"]:
            raise DamagedPackError(path, f"has `{size}` bytes in `{file.name}`, not `{entry['bytes']}`")
        mapped: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except DamagedPackError:
        raise
    except Exception as error:  # numpy's reader of headers raises what the text leads to: SyntaxError, TokenError, ...
        said = f"{type(error).__name__}: {error}"[:300]
        raise DamagedPackError(path, f"has a `{file.name}` that can't be read ({said})") from error
    if [str(mapped.dtype), list(mapped.shape)] != [entry.get("dtype"), entry.get("shape")]:
        raise DamagedPackError(
            path,
            f"holds {mapped.dtype} {mapped.shape} in `{file.name}`, not {entry.get('dtype')} {entry.get('shape')}",
        )
    return mapped


def verify(path: Path, progress: Progress = silent) -> None:
    """Read all files and compare their SHA-256 with the manifest's. Raises DamagedPackError."""
    manifest = read_manifest(path)
    if manifest is None:
        raise DamagedPackError(path, "is not there")
    total, done = sum(entry["bytes"] for entry in manifest["arrays"].values()), 0
    for array, entry in manifest["arrays"].items():
        file, digest = path / f"{array}.npy", hashlib.sha256()
        for piece in _pieces(path, file):
            digest.update(piece)
            done += len(piece)
            progress("verifying", done, total)
        if digest.hexdigest() != entry["sha256"]:
            raise DamagedPackError(
                path, f"has a `{file.name}` with the SHA-256 `{digest.hexdigest()}`, not `{entry['sha256']}`"
            )


def _pieces(path: Path, file: Path) -> Iterator[bytes]:
    try:
        with open_regular(file) as stream:
            while piece := stream.read(PIECE):
                yield piece
    except OSError as error:
        raise DamagedPackError(path, f"has a `{file.name}` that can't be read ({error.strerror})") from error


def write(data: Data, path: Path, *, sources: Sources, progress: Progress = silent) -> None:
    """Pack `data` into the folder `path`, inside `folder.only_one`. Raises CannotWriteError and leaves nothing then."""
    assert isinstance(data.train, ArrayDataset) and isinstance(data.eval, ArrayDataset)
    parts = (data.train.images, data.train.targets, data.eval.images, data.eval.targets)
    total, done = sum(part.nbytes for part in parts), 0
    with new_folder(path, size=total) as folder:
        entries = {}
        for name, array in zip(ARRAYS, parts, strict=True):
            entries[name] = _write_array(folder / f"{name}.npy", array, functools.partial(_tell, progress, done, total))
            done += array.nbytes
        manifest = {
            "format": FORMAT,
            "name": data.name,
            "num_classes": data.num_classes,
            "mean": list(data.mean),
            "std": list(data.std),
            "sources": sources,
            "arrays": entries,
        }
        write_new(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def _tell(progress: Progress, before: int, total: int, done: int) -> None:
    progress("packing", before + done, total)


def _write_array(file: Path, array: NDArray[Any], progress: Callable[[int], None]) -> dict[str, Any]:
    """Write an .npy file in pieces; what the manifest says about it."""
    digest, done = hashlib.sha256(), 0
    rows = max(1, PIECE // max(1, array[:1].nbytes))
    with file.open("xb") as stream:
        header = _Hashed(stream, digest)
        described = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
        np.lib.format.write_array_header_1_0(header, described)  # type: ignore[arg-type]
        for first in range(0, len(array), rows):
            piece = np.ascontiguousarray(array[first : first + rows]).tobytes()
            header.write(piece)
            done += len(piece)
            progress(done)
        stream.flush()
        os.fsync(stream.fileno())
        size = stream.tell()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "bytes": size, "sha256": digest.hexdigest()}


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, stream: Any, digest: Any) -> None:
        self._stream, self._digest = stream, digest

    def write(self, content: bytes) -> int:
        self._digest.update(content)
        return int(self._stream.write(content))


def copy(source: Path, path: Path, progress: Progress = silent) -> None:
    """Copy a packed folder, inside `folder.only_one`, and check each file's hash on the way.

    Raises DamagedPackError for the source, CannotWriteError for the copy, and leaves nothing then.
    """
    manifest = read_manifest(source)
    if manifest is None:
        raise DamagedPackError(source, "is not there")
    total, done = sum(entry["bytes"] for entry in manifest["arrays"].values()), 0
    with new_folder(path, size=total) as folder:
        for array, entry in manifest["arrays"].items():
            file, digest = source / f"{array}.npy", hashlib.sha256()
            with (folder / file.name).open("xb") as stream:
                for piece in _pieces(source, file):
                    digest.update(piece)
                    stream.write(piece)
                    done += len(piece)
                    progress("copying", done, total)
                stream.flush()
                os.fsync(stream.fileno())
            if digest.hexdigest() != entry["sha256"]:
                raise DamagedPackError(source, f"has a `{file.name}` whose SHA-256 is not `{entry['sha256']}`")
        write_new(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
