"""Write, verify, find the newest whole one, prune. Knows files, not ranks."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from hvd_ddp.durable import remove_temporaries, replace_file, sync_folder
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.outside import open_regular, read

NAME = re.compile(r"step_(\d{8,})\.pt")
PIECE = 1 << 20  # bytes read at a time


def save(
    folder: Path,
    step: int,
    state: dict[str, Any],
    *,
    keep: int,
    best: Iterable[int] = (),
    guard: Callable[[], None] = lambda: None,
) -> Path:
    """Write step_<step>.pt and its .sha256, both whole or not at all, then delete all but the newest `keep` and `best`.

    It gets its name when it has been read back from the disk and is what was meant. The hash is there first, so that a
    file without one was never whole. `guard` is called before anything in the folder changes, and may raise. Raises
    OSError; then nothing has changed.
    """
    guard()
    path = of_step(folder, step)
    folder.mkdir(parents=True, exist_ok=True)
    _clean(folder)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        digest = _write(temporary, state)
        if _digest(temporary) != digest:
            raise OSError(errno.EIO, "what was read back is not what was written", str(temporary))
        guard()  # that may have taken long
        replace_file(_hash_file(path), f"{digest}  {path.name}\n".encode())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    sync_folder(folder)
    with contextlib.suppress(OSError):  # the new one is there; the next save deletes again
        prune(path, keep=keep, best=best)
    return path


def prune(good: Path, *, keep: int, best: Iterable[int] = ()) -> None:
    """Delete all before `good`, which is whole, but so many that it makes `keep`, and but those of the steps `best`.

    Of a later step there can only be damaged ones, which were passed over: they stay and do not count. Raises OSError.
    """
    kept, wanted = found(good.parent), {of_step(good.parent, step) for step in best}
    for old in kept[kept.index(good) :][keep:] if good in kept else []:
        if old not in wanted:
            old.unlink(missing_ok=True)
            _hash_file(old).unlink(missing_ok=True)


class _Hashed(io.BufferedWriter):
    """A file that torch writes into, and the SHA-256 of what it was given.

    torch's writer does not bear exceptions of the file: the first is kept, and what comes after it dropped.
    """

    def __init__(self, raw: io.FileIO) -> None:
        super().__init__(raw, PIECE)
        self.hash = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Nothing is written after an error."""
        if self.error is None:
            try:
                super().write(data)
                self.hash.update(data)
            except OSError as error:
                self.error = error
        return len(data)


def _write(path: Path, state: dict[str, Any]) -> str:
    """A new file on the disk, piece by piece; its SHA-256."""
    with path.open("xb", buffering=0) as raw, _Hashed(raw) as file:
        torch.save(state, file)
        if file.error is not None:
            raise file.error
        file.flush()
        os.fsync(raw.fileno())
        return file.hash.hexdigest()


def _digest(path: Path) -> str:
    """SHA-256 of what the disk holds, as far as the system lets go of its own copy."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _clean(folder: Path) -> None:
    """Delete what writers left that were killed: temporaries, and hashes without a file."""
    remove_temporaries(folder)
    for hash_file in folder.glob("step_*.pt.sha256"):
        if not hash_file.with_suffix("").exists():
            hash_file.unlink(missing_ok=True)


def found(folder: Path) -> list[Path]:
    """All checkpoints of the folder, whole or not, newest first."""
    if not folder.is_dir():
        return []
    named = [(int(match[1]), path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named, reverse=True)]


def verified(path: Path) -> bytes:
    """The bytes of a checkpoint that fit the hash beside it. Raises HvdDDPError that says what is wrong."""
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        raise HvdDDPError(f"Checkpoint `{path}` can't be read: {error.strerror}.") from error
    try:
        wanted = read(_hash_file(path)).decode().split()[0]
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise HvdDDPError(f"Checkpoint `{path}` has no hash in `{_hash_file(path).name}`: it may be cut.") from error
    if hashlib.sha256(data).hexdigest() != wanted:
        raise HvdDDPError(f"Checkpoint `{path}` does not fit its hash: it is damaged.")
    return data


def newest_whole(folder: Path) -> tuple[Path | None, bytes, list[str]]:
    """The newest checkpoint that verifies, its bytes, and what was wrong with newer ones."""
    passed_over: list[str] = []
    for path in found(folder):
        try:
            return path, verified(path), passed_over
        except HvdDDPError as error:
            passed_over.append(str(error))
    return None, b"", passed_over


def parse(data: bytes, origin: str) -> dict[str, Any]:
    """What `save` was given, on the CPU; plain types and tensors only. Raises HvdDDPError."""
    try:
        _refuse_bombs(data)
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        _refuse_large(state, len(data))
    except Exception as error:  # torch raises what the damage leads to: RuntimeError, UnpicklingError, EOFError, ...
        # Not its words: they advise to load the file without the restriction.
        raise HvdDDPError(
            f"`{origin}` is no checkpoint of tensors and plain types ({type(error).__name__}): nothing else is loaded. "
            "Give a file that train or torch.save(model.state_dict()) wrote."
        ) from error
    if not isinstance(state, dict):
        raise HvdDDPError(f"`{origin}` holds a {type(state).__name__}, not a dict. Give a checkpoint or a state dict.")
    return state


def _refuse_bombs(data: bytes) -> None:
    """Raise ValueError for a file whose content takes more memory than the file: torch writes no such one."""
    if any(b"c%s\nbytearray\n" % module in data for module in (b"builtins", b"__builtin__")):
        raise ValueError("bytes of any number")
    if data.startswith(b"PK\x03\x04"):
        entries = zipfile.ZipFile(io.BytesIO(data)).infolist()
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        if not stored or sum(entry.file_size for entry in entries) > len(data):
            raise ValueError("compressed")


def _refuse_large(state: Any, size: int) -> None:
    """Raise ValueError for tensors of other kinds than torch.strided on the CPU, or with more elements than they store.

    They would take their memory, or raise, where they are first used.
    """
    left, seen, stored = [state], set[int](), dict[int, int]()
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
                raise ValueError(f"a tensor of the kind {value.layout} on {value.device}")
            storage = value.untyped_storage()
            stored[storage.data_ptr()] = storage.nbytes()
            if value.numel() * value.element_size() > storage.nbytes():
                raise ValueError("an expanded tensor")
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left += [*value.keys(), *value.values()] if isinstance(value, dict) else value
    if sum(stored.values()) > size:
        raise ValueError("tensors without content")


def of_step(folder: Path, step: int) -> Path:
    """Where the checkpoint of that step is, if there is one."""
    return folder / f"step_{step:08d}.pt"


def _hash_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")
