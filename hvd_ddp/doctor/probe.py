"""Ask another program, which may crash, hang or print anything: within a time, and without harm to this process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

MARK = "hvd_ddp-doctor:"  # before the answer, among whatever libraries print
LAST_BREATH = 5.0  # seconds in which a killed program's pipes must close
RULE = re.compile(r"^[-=*]{10,}$", re.MULTILINE)  # MPI frames what it says


class NoAnswerError(Exception):
    """Why the program did not answer, in one line."""


def ask(command: Sequence[str], seconds: float) -> str:
    """What the command prints, stdout before stderr. Raises NoAnswerError unless it ends well in so many seconds."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise NoAnswerError(f"{command[0]}: {error.strerror}") from error
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=LAST_BREATH)
        raise NoAnswerError(f"no answer in {seconds:g} s") from None
    if process.returncode:
        raise NoAnswerError(_reason(process.returncode, err or out))
    return out + err


def ask_python(arguments: Sequence[str], seconds: float) -> Any:
    """What another Python answers by `answer`: JSON after MARK. Raises NoAnswerError."""
    text = ask([sys.executable, *arguments], seconds)
    for line in reversed(text.splitlines()):
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    raise NoAnswerError("it ended without an answer")


def code(body: str) -> list[str]:
    """Arguments of a Python that runs `body`, which sets `answer`."""
    return ["-c", f"import json\n{body}\nprint('\\n{MARK}' + json.dumps(answer), flush=True)"]


def _reason(returncode: int, text: str) -> str:
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    *_, said = ["", *filter(None, map(str.strip, RULE.split(text)))]
    if text.rstrip().endswith(said):  # the last line alone says why; what MPI has framed is a whole
        said = said.rpartition("\n")[2]
    return " ".join(said.split())[:400] or f"it ended with {returncode}"
