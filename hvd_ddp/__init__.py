"""One PyTorch trainer over native DDP and Horovod, for MPI clusters."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Backend", "Communication", "HvdDDPError", "TrainConfig", "Trainer", "connect"]

_WHERE = {
    "Backend": "hvd_ddp.backends.base",
    "Communication": "hvd_ddp.config",
    "HvdDDPError": "hvd_ddp.errors",
    "TrainConfig": "hvd_ddp.config",
    "Trainer": "hvd_ddp.trainer",
    "connect": "hvd_ddp.backends",
}


def __getattr__(name: str) -> Any:
    # Late, so that `import hvd_ddp` imports no torch: --help stays quick, and doctor runs where torch is broken.
    if name not in _WHERE:
        raise AttributeError(f"module 'hvd_ddp' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
