"""What a name of a data set stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvd_ddp.data.arrays import Data
from hvd_ddp.data.packed import Progress, Sources
from hvd_ddp.errors import HvdDDPError


def _no_files(data_dir: Path) -> list[Path]:
    return []


@dataclass(frozen=True)
class Survey:
    """Data of which one rank finds out something for all, so that not every rank has to look at every file.

    Both raise HvdDDPError for data that is missing or damaged.
    """

    look: Callable[[Path | None], bytes]
    read: Callable[[Path | None, bytes], Data]  # given what `look` has found


@dataclass(frozen=True)
class Source:
    """Where a data set comes from. `read` raises HvdDDPError for files that are missing or damaged."""

    about: str  # for `data list`
    read: Callable[[Path | None], Data]
    files: Callable[[Path], list[Path]] = _no_files  # what `read` reads, all of it or nothing
    download: Callable[[Path], None] | None = None  # into the folder; only where someone asks for it
    packs: bool = True  # whether a packed form makes sense
    train_packs: bool = True  # whether train may make it; else only `data prepare` and --stage do
    survey: Survey | None = None
    verify: Callable[[Data, Progress], None] | None = None  # look at every sample; raises HvdDDPError

    @classmethod
    def surveyed(
        cls,
        about: str,
        look: Callable[[Path | None], bytes],
        read: Callable[[Path | None, bytes], Data],
        verify: Callable[[Data, Progress], None] | None = None,
    ) -> Source:
        """Data without a packed form, read after a survey."""
        survey = Survey(look, read)
        return cls(about, lambda data_dir: read(data_dir, look(data_dir)), packs=False, survey=survey, verify=verify)

    def fingerprint(self, data_dir: Path | None) -> Sources:
        """Size and time of change of each file that the data is read from; empty where they are not there."""
        found: Sources = {}
        for path in self.files(data_dir) if data_dir is not None else []:
            status = path.stat()
            found[str(path)] = [status.st_size, status.st_mtime_ns]
        return found


def fetch(url: str, file: Path, checksum: str) -> None:
    """Download to `file`, checked against its published MD5; nothing else is left. Raises HvdDDPError."""
    from torchvision.datasets.utils import download_url

    partial = file.with_name(f".{file.name}.part")
    try:
        download_url(url, str(file.parent), partial.name, checksum)
        partial.replace(file)
    except (OSError, RuntimeError) as error:  # URLError is an OSError; a wrong checksum is a RuntimeError
        partial.unlink(missing_ok=True)
        raise HvdDDPError(
            f"`{url}` can't be downloaded to `{file.parent}`: `{' '.join(str(error).split())}`. "
            f"On a machine without a network, fetch it elsewhere and put it there as `{file.name}`."
        ) from error
