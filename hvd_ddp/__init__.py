"""One PyTorch trainer over native DDP and Horovod, for MPI clusters."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Backend", "Communication", "HvdDDPError", "Task", "TrainConfig", "Trainer", "connect", "own_data"]

_WHERE = {
    "Backend": "hvd_ddp.backends.base",
    "Communication": "hvd_ddp.config",
    "HvdDDPError": "hvd_ddp.errors",
    "Task": "hvd_ddp.tasks",
    "TrainConfig": "hvd_ddp.config",
    "Trainer": "hvd_ddp.trainer",
    "connect": "hvd_ddp.backends",
    "own_data": "hvd_ddp.data.own",
}


def __getattr__(name: str) -> Any:
    # Late, so that `import hvd_ddp` imports no torch: --help stays quick, and doctor runs where torch is broken.
    if name not in _WHERE:
        raise AttributeError(f"module 'hvd_ddp' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
