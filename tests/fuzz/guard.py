"""The property that every example must keep, and how many examples there were.

Whatever is found outside, the product takes it or refuses it with an HvdDDPError (or exit code 2 of the parser): no
other exception, no hang, no write outside of the folder that it was given, no process started, nothing unpickled, and
no memory out of proportion.
"""

import contextlib
import os
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, find, given, settings
from hypothesis.strategies import SearchStrategy

from hvd_ddp.errors import HvdDDPError

LIMIT = 10.0  # seconds an example, on a machine with much else to do
MEMORY = 192 << 20  # bytes by which an example may let the process grow
ROOM = 4 << 30  # bytes of addresses, so that a fault is an error here and no end of the machine
OUTSIDE = b"of somebody else"
LONGEST = 8000  # characters of an error that a person is to read
EXAMPLES: Counter[str] = Counter()  # by the name of the test
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NEVER = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen"}
GONE = NEVER | {"os.remove", "os.rmdir", "os.rename"}  # of which nothing is left to be seen
CHANGES = {"os.mkdir": (-1,), "os.rmdir": (-1,), "os.remove": (-1,), "os.truncate": (), "os.chmod": (-1,),
           "os.rename": (-2, -1), "os.link": (-2, -1), "os.symlink": (-1,)}  # fmt: skip


class HangError(BaseException):
    """Nothing in the product catches it."""


class _Watch:
    """What this process does to the system, told by Python's own audit events."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.faults: list[tuple[str, str]] = []
        self._hooked = False

    def begin(self, folder: Path) -> None:
        if not self._hooked:
            sys.addaudithook(self._hook)
            self._hooked = True
        self.folder, self.faults = os.path.realpath(folder), []

    def end(self) -> list[str]:
        """What was done; of what was tried outside, what is there now."""
        self.folder = None
        return [f"{event} {path}" for event, path in self.faults if event in GONE or os.path.lexists(path)]

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in NEVER:
            self.faults.append((event, f"{arguments!r}"[:500]))
        elif event == "open":
            if arguments[2] & WRITES:
                self._wrote("os.open" if arguments[2] & os.O_NOFOLLOW else event, arguments[0])
        elif event in CHANGES:
            names = arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]
            if event == "os.symlink":
                names = arguments[1:2]
            folders = [arguments[position] for position in CHANGES[event]] or [-1]
            for name, folder in zip(names, folders, strict=True):
                self._wrote(event, name, folder)

    def _wrote(self, event: str, name: Any, folder: int = -1) -> None:
        if isinstance(name, int) or name is None:
            return
        path = os.fsdecode(name)
        if folder != -1:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        if event != "open":  # the last part itself is what changes, also where it is a link
            path = os.path.join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))
        else:
            path = os.path.realpath(path)
        assert self.folder is not None
        if event == "os.mkdir" and os.path.isdir(path):
            return  # nothing comes of it
        if path != os.devnull and not (path + "/").startswith(self.folder + "/"):
            self.faults.append((event, path))


WATCH = _Watch()


def _peak() -> int:
    """The most memory that this process held since the last call, in bytes."""
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return peak


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """In time and memory."""

    def ring(*_: object) -> None:
        raise HangError(f"it takes longer than {LIMIT} s")

    handler = signal.signal(signal.SIGALRM, ring)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    _peak()
    before = _peak()
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
        grown = _peak() - before
        assert grown < MEMORY, f"it took {grown >> 20} MB"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def fuzz(
    examples: int, seeds: Sequence[Any] = (), **strategies: SearchStrategy[Any]
) -> Callable[[Callable[..., object]], Callable[[], None]]:
    """Make a test of `work(folder, **drawn)`, which may write below `folder` / "inside" and nowhere else.

    The strategies are of `drawn`. `examples` are those of a short run; before them come `seeds`, of the first strategy.
    """

    def decorate(work: Callable[..., object]) -> Callable[[], None]:
        name = f"{work.__module__.rpartition('.')[2]}.{work.__name__}"

        def test(**drawn: Any) -> None:
            EXAMPLES[name] += 1
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "inside").mkdir()
                (Path(folder) / "outside").write_bytes(OUTSIDE)
                check(work, Path(folder), **drawn)
                assert (Path(folder) / "outside").read_bytes() == OUTSIDE

        test.__name__, test.__doc__, test.__module__ = work.__name__, work.__doc__, work.__module__
        test.__qualname__ = work.__qualname__
        short = settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        fuzzed = given(**strategies)(test)
        for seed in seeds:
            others = {other: find(strategy, lambda _: True) for other, strategy in list(strategies.items())[1:]}
            fuzzed = example(**{next(iter(strategies)): seed, **others})(fuzzed)
        return short(fuzzed)

    return decorate


def check(work: Callable[..., object], folder: Path, **drawn: Any) -> str:
    """Run one example; what it was refused with, or nothing."""
    said, before = "", Path.cwd()
    os.chdir(folder / "inside")
    try:
        with _bounded():
            try:
                WATCH.begin(folder / "inside")
                work(folder, **drawn)
            except HvdDDPError as error:
                said = str(error)
            except SystemExit as end:
                assert end.code == 2, f"exit code {end.code}"
            finally:
                faults = WATCH.end()
    finally:
        os.chdir(before)
    assert not faults, faults
    assert len(said) < LONGEST, f"an error of {len(said)} characters"
    return said
