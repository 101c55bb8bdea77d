"""completion: real shells on a terminal, with the script that is printed for them."""

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launchers import Result, environment

from hvd_ddp.commands import COMMANDS
from hvd_ddp.commands.completion import kinds

Cli = Callable[..., Result]
SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
PATIENCE = 20  # seconds


class Shell:
    """An interactive shell on a terminal of its own, in a folder with one file."""

    def __init__(self, name: str, folder: Path, script: str) -> None:
        self.name = name
        (folder / "script").write_text(script)
        (folder / "weights.pt").touch()
        self._terminal, theirs = pty.openpty()
        env = environment(PS1="ready> ", HOME=str(folder), TERM="dumb", INPUTRC="/dev/null")
        self.process = subprocess.Popen(
            SHELLS[name], cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.says("", "ready>")
        self.says('hvd-ddp() { echo got:"$*":; }; . ./script\r', "ready>")

    def says(self, keys: str, awaited: str) -> str:
        """What comes after these keys, up to what is awaited."""
        os.write(self._terminal, keys.encode())
        text, end = "", time.monotonic() + PATIENCE
        while awaited not in text:
            ready, _, _ = select.select([self._terminal], [], [], max(end - time.monotonic(), 0))
            assert ready, f"{awaited!r} did not come within {PATIENCE} s, but {text!r}"
            text += os.read(self._terminal, 4096).decode(errors="replace")
        return text

    def completes(self, line: str) -> str:
        """What the shell makes of `hvd-ddp LINE` and one tab; it is then run, by a stand-in that says its words."""
        words = self.says(f"hvd-ddp {line}\t\r", ":\r\n").split("got:")[1]
        if "ready>" not in words:
            self.says("", "ready>")
        return words.partition(":\r\n")[0].strip()


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, cli: Cli, tmp_path: Path) -> Iterator[Shell]:
    printed = cli("completion", request.param)
    assert printed.code == 0, printed.text
    shell = Shell(request.param, tmp_path, printed.out)
    yield shell
    os.killpg(shell.process.pid, signal.SIGKILL)
    shell.process.wait()


def test_a_shell(shell: Shell) -> None:
    for line, wanted in (
        ("eval", "evaluate"),
        ("bench fol", "bench folder"),
        ("train --global-b", "train --global-batch"),
        ("--global-b", "--global-batch"),
        ("scaling --hostf", "scaling --hostfile"),
        ("train --lr 1 --optimizer adamw --schedule pl", "train --lr 1 --optimizer adamw --schedule plateau"),
        ("bench step --compression pow", "bench step --compression powersgd"),
        ("evaluate weig", "evaluate weights.pt"),
        ("train --init weig", "train --init weights.pt"),
        ("submit --nodes 2 -- --warm", "submit --nodes 2 -- --warmup-steps"),
        ("completion z", "completion zsh"),
        ("train --no-such", "train --no-such"),
        *([("train --schedule=pl", "train --schedule=plateau")] if shell.name == "bash" else []),
    ):
        assert shell.completes(line) == wanted


def test_the_script(cli: Cli, tmp_path: Path) -> None:
    """All commands are in it, and it is one that shellcheck has nothing to say of."""
    printed = cli("completion", "bash")
    (tmp_path / "script").write_text(printed.out)
    result = subprocess.run(
        ["shellcheck", "--shell", "bash", tmp_path / "script"], env=environment(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout
    assert {name.split()[0] for name in kinds()} == set(COMMANDS)


def test_another_shell(cli: Cli) -> None:
    result = cli("completion", "csh")
    assert result.code == 2 and "bash" in result.err and not result.out
