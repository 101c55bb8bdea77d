"""Parse, dispatch; user errors end here as one paragraph."""

import difflib
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from hvd_ddp.commands import COMMANDS
from hvd_ddp.errors import FAILED, INTERRUPTED, HvdDDPError
from hvd_ddp.job.launch import is_speaker

SILENCE = 2.0  # seconds that a rank stays which leaves the word to rank 0: mpirun kills all when the first has left


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `hvd_ddp.errors`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        name = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "train"
        code: int = _command(name).run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # of `--help | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except HvdDDPError as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun sends it when the first has left, and would report 143
        if is_speaker() or not error.everywhere:
            print(f"hvd_ddp: {error}", file=sys.stderr)
        else:
            time.sleep(SILENCE)
        return error.exit_code
    except SystemExit as end:  # of the parser, which has said why on the rank that speaks
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if end.code and not is_speaker():
            time.sleep(SILENCE)
        raise


def _command(name: str) -> Any:
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        raise HvdDDPError(
            f"`{name}` is none of the commands: {', '.join(COMMANDS)}." + (f" Did you mean {near[0]}?" if near else "")
        )
    return import_module(COMMANDS[name])
