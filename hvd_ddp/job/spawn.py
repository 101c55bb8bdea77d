"""Start ranks on this machine with torch's own elastic launcher."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil

from hvd_ddp.errors import FAILED, FINISHED, HvdDDPError
from hvd_ddp.job.launch import Launch

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

LOCAL = "hvd_ddp-local"
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def spawn(num_ranks: int, arguments: Sequence[str], *, module: str = "hvd_ddp") -> int:
    """Run `python -m <module> <arguments>` as `num_ranks` local ranks; returns the first failing rank's exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failing rank has said it
    rendezvous_handler_registry.register(LOCAL, _local_rendezvous)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend=LOCAL,
        max_restarts=0,
        signals_to_handle="SIGQUIT",  # the agent would take the others as an order to end the ranks: see _pass_on
    )
    for number in PASSED_ON:
        signal.signal(number, _pass_on)
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else FAILED
    return FINISHED


def command(num_ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
    """What runs `spawn` in a process of its own."""
    return [sys.executable, "-m", "hvd_ddp.job.spawn", str(num_ranks), module, *arguments]


def _pass_on(number: int, _: object) -> None:
    """The ranks know what to do. They have sessions of their own: the terminal's Ctrl-C comes to this process alone."""
    ranks = psutil.Process().children()
    if not ranks:
        sys.exit(128 + number)
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            rank.send_signal(number)


def _local_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """A rendezvous of one node with a store on loopback.

    torch's own two listen on every interface, and the c10d one unpickles what it finds in its store.
    """
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    from hvd_ddp.job.network import LOOPBACK, serve_store

    class OneNode(RendezvousHandler):
        use_agent_store = True  # type: ignore[assignment]

        def get_backend(self) -> str:
            return LOCAL

        def next_rendezvous(self) -> RendezvousInfo:
            self._store, port = serve_store(LOOPBACK)
            return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return parameters.run_id

        def shutdown(self) -> bool:
            return True

    return OneNode()


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


if __name__ == "__main__":
    sys.exit(spawn(int(sys.argv[1]), sys.argv[3:], module=sys.argv[2]))
