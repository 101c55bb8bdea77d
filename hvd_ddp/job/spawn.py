"""Start ranks on this machine with torch's own elastic launcher."""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from collections.abc import Sequence

from hvd_ddp.errors import FAILED, FINISHED, INTERRUPTED, HvdDDPError
from hvd_ddp.job.launch import Launch


def spawn(num_ranks: int, arguments: Sequence[str]) -> int:
    """Run `python -m hvd_ddp <arguments>` as `num_ranks` local ranks; returns the first failing rank's exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failing rank has said it
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "hvd_ddp", *arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else FAILED
    except SignalException as stopped:  # the agent has passed it on and the ranks are gone
        return INTERRUPTED if stopped.sigval == signal.SIGINT else 128 + stopped.sigval
    return FINISHED


def wants_ranks(nproc: int | None, launch: Launch) -> bool:
    """Whether this process is to start ranks, rather than be one.

    Raises HvdDDPError where each of several tasks would start a job of its own.
    """
    if nproc is None or (launch.launcher == "torchrun" and launch.local_world_size == nproc):
        return False  # the second: one of those that were started
    if launch.world_size == 1:
        return nproc > 1
    raise HvdDDPError(
        f"--nproc is `{nproc}`, but {launch.launcher} started `{launch.world_size}` tasks: each would start a job of "
        "its own. Leave --nproc out, or start one task."
    )
