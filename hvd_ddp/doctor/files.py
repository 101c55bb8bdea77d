"""Folders: can the run be written, is the data there, how much room is left."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hvd_ddp.doctor.check import Check, Patient, failure, ok, warning

LITTLE = 1 << 30  # bytes left, below which a run may fill the disk
ENTRIES = 1000  # of a folder, that are compared between hosts


def run_directory(patient: Patient) -> Iterator[Check]:
    """Whether a run can be written, by writing."""
    folder = nearest(patient.run_dir)
    remedy = "Choose a --run-dir on a file system that all ranks see and you may write."
    what = f"{patient.run_dir.absolute()}"
    probe = folder / f".doctor-{secrets.token_hex(8)}"
    try:
        if not folder.is_dir():
            raise NotADirectoryError(20, "Not a directory")
        with open(probe, "xb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield failure("run directory", f"{what} can't be written: {error.strerror} ({kind(folder)})", remedy)
        return
    finally:
        with suppress(OSError):
            probe.unlink()
    free = shutil.disk_usage(folder).free
    detail = f"{what}: {kind(folder)}, {free / 1e9:,.1f} GB free"
    yield ok("run directory", detail) if free >= LITTLE else warning("run directory", detail, remedy)


def data_directory(patient: Patient) -> Iterator[Check]:
    """Whether the data is there, and may be packed there."""
    if patient.data_dir is None:
        return
    folder = patient.data_dir.absolute()
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)[:ENTRIES]
        listing = [(entry.name, entry.stat().st_size if entry.is_file() else 0) for entry in entries]
    except OSError as error:
        remedy = "Give a --data-dir that every host sees, or put a copy at the same place on each."
        yield failure("data directory", f"{folder} can't be read: {error.strerror}", remedy)
        return
    patient.facts["data"] = hashlib.sha256(repr(listing).encode()).hexdigest()[:8]
    detail = f"{folder}: {kind(folder)}, {len(entries)} entries"
    if os.access(folder, os.W_OK):
        yield ok("data directory", detail)
    else:
        packed = [entry.name for entry in entries if entry.name.endswith(".packed")]
        also = f"packed already: {', '.join(packed)}" if packed else "nothing is packed"
        yield warning(
            "data directory",
            f"{detail}; it may not be written, and {also}",
            "Pack it into a folder of your own (data prepare); sets that need no packing are read as they are.",
        )


def nearest(path: Path) -> Path:
    """The path itself or its nearest parent that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def kind(path: Path) -> str:
    """The file system that holds it: nfs4, lustre, ext4, ..."""
    best, name = Path("/"), "unknown file system"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, this, *_ = line.split(" ")
        point = Path(mount.encode().decode("unicode_escape"))
        if path.absolute().is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, name = point, this
    return name
