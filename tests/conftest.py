"""The command line in this process, for tests that need no ranks, and a cluster, for those that need hosts."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.slurm import Cluster
from launchers import Result

from hvd_ddp.main import main

Cli = Callable[..., Result]
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Left(BaseException):
    """Instead of os._exit, by which a job whose training failed ends."""


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """What a test leaves in the environment, all later ones start their ranks with."""

    def environment() -> dict[str, str]:
        theirs = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")  # what pytest and torch set
        return {name: value for name, value in os.environ.items() if name not in theirs}

    before = environment()
    yield
    assert environment() == before


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """`python -m hvd_ddp ...` in this process and in an empty folder; its exit code and what it wrote."""

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    folder = tmp_path / "cwd"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)

    def start(*arguments: str) -> Result:
        capfd.readouterr()
        handlers = {number: signal.getsignal(number) for number in CAUGHT}
        try:
            code: Any = main(list(arguments))
        except (Left, SystemExit) as end:
            code = end.args[0]
        finally:
            gc.unfreeze()
            signal.set_wakeup_fd(-1)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return Result(int(code), *capfd.readouterr())

    return start


@pytest.fixture
def cluster(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm cluster of the test's own, three nodes with 4 CPUs each, up in a second; see tests/cluster/README.md.

    Its commands and jobs run in `tmp_path`, which all hosts share.
    """
    with Cluster.start(3, shared=[tmp_path_factory.getbasetemp()]) as cluster:
        cluster.folder = tmp_path
        yield cluster
