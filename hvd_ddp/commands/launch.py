"""launch: starts the ranks of a training where no launcher of a cluster does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from hvd_ddp.commands.options import wrapped
from hvd_ddp.commands.starters import outside
from hvd_ddp.commands.train import parse
from hvd_ddp.errors import HvdDDPError


@dataclass(frozen=True)
class Options:
    """Start the ranks of a training on a Ray cluster: python -m hvd_ddp launch --on ray -n 8 TRAIN OPTIONS

    The cluster is that of RAY_ADDRESS, else the one that runs on this machine, else a new one on this machine for this
    training alone. Each rank has a CPU of it, or a GPU where there are any and --device is not cpu, and runs in this
    folder, which all nodes must see. Ray must have the room within --start-timeout. Signals and Ctrl-C go to all ranks,
    the exit code is theirs.
    """

    on: Literal["ray"]
    """What runs the ranks."""
    ranks: Annotated[int, tyro.conf.arg(aliases=("-n",))]
    """Number of ranks."""

    def __post_init__(self) -> None:
        """Raise ValueError for a number that can't be."""
        if self.ranks < 1:
            raise ValueError(f"-n is `{self.ranks}`. Give a whole number from 1 up.")


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp launch`."""
    options, training = tyro.cli(
        Options, prog="python -m hvd_ddp launch", description=wrapped(Options.__doc__ or ""),
        args=arguments, return_unknown_args=True,
    )  # fmt: skip
    outside("launch")
    config = parse(training)  # leaves with 2 where train would, before Ray is asked for room
    if config.nproc is not None:
        raise HvdDDPError(f"--nproc is `{config.nproc}`, and launch starts the ranks itself. Leave it out, or give -n.")
    from hvd_ddp.job.ray_ranks import spawn

    return spawn(options.ranks, ["train", *training], on=config.device, patience=config.start_timeout)
