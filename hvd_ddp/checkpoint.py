"""Write, verify, find the newest whole one, prune. Knows files, not ranks."""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path
from typing import Any

import torch

from hvd_ddp.durable import replace_file
from hvd_ddp.errors import HvdDDPError

NAME = re.compile(r"step_(\d{8,})\.pt")


def save(folder: Path, step: int, state: dict[str, Any], *, keep: int) -> Path:
    """Write step_<step>.pt and its .sha256, both whole or not at all, then delete all but the newest `keep`.

    The hash is there first, so that a file without one was never whole. Of a later step there can only be damaged ones,
    which were passed over: they stay and do not count. Raises OSError.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path = folder / f"step_{step:08d}.pt"
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.tmp"):
        stale.unlink(missing_ok=True)
    replace_file(_hash_file(path), f"{digest}  {path.name}\n".encode())
    replace_file(path, buffer.getbuffer())
    kept = found(folder)
    for old in kept[kept.index(path) :][keep:]:
        old.unlink(missing_ok=True)
        _hash_file(old).unlink(missing_ok=True)
    return path


def found(folder: Path) -> list[Path]:
    """All checkpoints of the folder, whole or not, newest first."""
    if not folder.is_dir():
        return []
    named = [(int(match[1]), path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named, reverse=True)]


def verified(path: Path) -> bytes:
    """The bytes of a checkpoint that fit the hash beside it. Raises HvdDDPError that says what is wrong."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise HvdDDPError(f"Checkpoint `{path}` can't be read: {error.strerror}.") from error
    try:
        wanted = _hash_file(path).read_text().split()[0]
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
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what the damage leads to: RuntimeError, UnpicklingError, EOFError, ...
        # Not its words: they advise to load the file without the restriction.
        raise HvdDDPError(
            f"`{origin}` is no checkpoint of tensors and plain types ({type(error).__name__}): nothing else is loaded. "
            "Give a file that train or torch.save(model.state_dict()) wrote."
        ) from error
    if not isinstance(state, dict):
        raise HvdDDPError(f"`{origin}` holds a {type(state).__name__}, not a dict. Give a checkpoint or a state dict.")
    return state


def _hash_file(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")
