"""How rank 0's card (addresses, port, token) travels to the other ranks, by what the launcher left."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import urllib.request
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch
from hvd_ddp.outside import from_json, read

STALE = 7 * 86_400.0  # seconds after which no job still waits for its ranks


class Channel(Protocol):
    """Carries one small card from rank 0 to all others of the same job."""

    def offer(self, card: bytes) -> None:
        """Rank 0: make the card readable."""

    def card(self) -> bytes | None:
        """Others: the card, or None while it is not there."""

    def withdraw(self) -> None:
        """Rank 0, when all have arrived: leave nothing behind."""


def write_card(addresses: Sequence[tuple[str, int]], token: bytes) -> bytes:
    """Rank 0's addresses and the job's token."""
    return json.dumps({"addresses": addresses, "token": token.hex()}).encode()


def read_card(card: bytes | None) -> tuple[list[tuple[str, int]], bytes] | None:
    """What `write_card` was given; None for what is no card (of a full disk, of another version): look again."""
    try:
        content = from_json(card or b"")
        return [(str(host), int(port)) for host, port in content["addresses"]], bytes.fromhex(content["token"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def channel_for(launch: Launch, directory: Path) -> Channel:
    """The channel that this launcher offers: its own store where it has one, else a file that all ranks see."""
    if launch.torchrun_store:
        return TorchrunChannel(launch)
    if launch.horovodrun_store:
        return HorovodrunChannel(launch)
    if launch.ray_folder:
        return FileChannel(Path(launch.ray_folder), "card")  # ray_holder.CARD
    return FileChannel(directory, launch.job)


class TorchrunChannel:
    """The store that torchrun's ranks have in common anyway."""

    def __init__(self, launch: Launch) -> None:
        from torch.distributed import DistNetworkError, TCPStore

        assert launch.torchrun_store is not None
        host, port, served = launch.torchrun_store
        try:
            self._store = TCPStore(
                host, port, None, not served and launch.rank == 0, timedelta(seconds=60), wait_for_workers=False
            )
        except DistNetworkError as error:
            raise HvdDDPError(f"torchrun's store at `{host}:{port}` does not answer: {error}. Start again.") from error
        self._key = "hvd_ddp/card/" + launch.job

    def offer(self, card: bytes) -> None:
        self._store.set(self._key, card.decode())

    def card(self) -> bytes | None:
        return bytes(self._store.get(self._key)) if self._store.check([self._key]) else None

    def withdraw(self) -> None:
        self._store.delete_key(self._key)


class HorovodrunChannel:
    """The key-value server that horovodrun runs for its ranks in Gloo mode."""

    def __init__(self, launch: Launch) -> None:
        assert launch.horovodrun_store is not None
        host, port = launch.horovodrun_store
        self._url = f"http://{host}:{port}/hvd_ddp/card"
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # never through a site's proxy

    def offer(self, card: bytes) -> None:
        try:
            self._open(urllib.request.Request(self._url, data=card, method="PUT"), timeout=10).close()
        except (OSError, http.client.HTTPException) as error:
            raise HvdDDPError(f"horovodrun's server at `{self._url}` does not answer: {error}. Start again.") from error

    def card(self) -> bytes | None:
        try:
            with self._open(self._url, timeout=10) as answer:
                return bytes(answer.read(1 << 16)) or None
        except (OSError, http.client.HTTPException):  # not there yet, or for the moment out of reach
            return None

    def withdraw(self) -> None:
        with contextlib.suppress(HvdDDPError):
            self.offer(b"")


class FileChannel:
    """A file that only its owner can read, on the file system that the ranks share.

    MPI could carry the card as well, but then every DDP run would start MPI (1.1 s, and finalising it on every way
    out) for the sake of 200 bytes. A stale file of a killed job does no harm: its token opens nothing, and readers
    look again until the start times out. Who starts in the same folder a week later sweeps it up.
    """

    def __init__(self, directory: Path, job: str) -> None:
        """Raise HvdDDPError on every rank where rank 0 could not write: no rank waits for a card that can't come."""
        there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise self._refusal(directory, "Not a directory" if not there.is_dir() else "Permission denied")
        self._path = directory / (".rendezvous-" + re.sub(r"[^A-Za-z0-9.-]", "_", job))
        self._made: list[Path] = []

    def offer(self, card: bytes) -> None:
        folder = self._path.parent
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        temporary = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(card)
            os.replace(temporary, self._path)
            self._sweep()
        except OSError as error:
            raise self._refusal(folder, str(error.strerror)) from error

    def _sweep(self) -> None:
        now = self._path.stat().st_mtime  # by the file system's clock
        for path in self._path.parent.glob(".rendezvous-*"):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > STALE:
                    path.unlink()

    @staticmethod
    def _refusal(folder: Path, reason: str) -> HvdDDPError:
        return HvdDDPError(
            f"`{folder}` can't be written ({reason}): the ranks could not find each other. "
            "Choose a --run-dir (for evaluate: work in a folder) on a file system that all ranks see and you may write."
        )

    def card(self) -> bytes | None:
        with contextlib.suppress(OSError):
            os.listdir(self._path.parent)  # makes NFS look again instead of remembering that there was no file
            if self._path.stat().st_uid == os.getuid():  # nobody else's address
                return read(self._path)
        return None

    def withdraw(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            for folder in self._made:
                folder.rmdir()
