"""What a person sees of a training: on a terminal, and in a file."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from launchers import ROOT, environment, run

COMMAND = [sys.executable, "-m", "hvd_ddp", "--model", "factories:Small", "--threads", "1", "--max-steps", "60"]


def on_a_terminal(command: list[str], folder: Path, columns: int) -> str:
    """All that it writes on one of that width, without what moves the cursor and colours."""
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = environment(TERM="xterm", PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    process = subprocess.Popen(command, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    try:
        while block := os.read(mine, 4096):
            written += block
    except OSError:  # the other side is closed: the process has ended
        pass
    assert process.wait(10) == 0, written.decode()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode())


def test_a_terminal(tmp_path: Path) -> None:
    """A bar with the time left, and below it throughput, loss, rate and accuracy; all of it on 80 columns."""
    text = on_a_terminal(COMMAND, tmp_path, 80)
    assert re.search(r"━ +60/60 \d:\d\d:\d\d left\s", text), text[-2000:]
    figures = r"epoch \d  loss \d\.\d{4}  lr 1\.00e-03  \d+ samples/s  evaluated: accuracy 0\.\d{4}"
    assert re.findall(rf"^{figures}\s*$", text, re.MULTILINE)[-1].startswith("epoch 2 ")
    assert "finished: 60 steps in " in text


def test_a_file(tmp_path: Path) -> None:
    """A line an interval, then the table, and as the last line how it has ended."""
    result = run(COMMAND, cwd=tmp_path, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert result.code == 0, result.text
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in result.out.splitlines()]
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == [f"{step}/60" for step in range(10, 61, 10)]
    assert "evaluated" not in steps[1] and " evaluated: accuracy 0." in steps[2]
    names = ("steps", "throughput", "where the time went", "best evaluation", "finished:")
    assert [name for name, line in zip(names, lines[-5:], strict=True) if not line.startswith(name)] == []
    assert re.fullmatch(r"best evaluation +accuracy 0\.\d{4}, at step (23|46|60)", lines[-2])
    assert re.fullmatch(r"throughput +[\d,]+ samples/s, [\d,]+ a rank", lines[-4])
