"""Parse, dispatch; user errors end here as one paragraph."""

import sys
from collections.abc import Sequence
from importlib import import_module

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import is_speaker

COMMANDS = {
    "train": "hvd_ddp.commands.train",
    "evaluate": "hvd_ddp.commands.evaluate",
    "install-horovod": "hvd_ddp.commands.install_horovod",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `hvd_ddp.errors`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "train"
    try:
        code: int = import_module(COMMANDS[name]).run(arguments)
        return code
    except HvdDDPError as error:
        if is_speaker() or not error.everywhere:
            print(f"hvd_ddp: {error}", file=sys.stderr)
        return error.exit_code
