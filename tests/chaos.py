"""SIGKILL at random moments, a third of them during a save: `PYTHONPATH=. python tests/chaos.py --kills 300`.

Two ranks train under a backend drawn for each start, are killed, and are started again from what is there. Each start
must go on from the newest checkpoint that is whole (judged here, with sha256 alone), and every run that was killed
some ten times must end with the bits of one that was not. To start ranks is to fork them from this process, which has
imported everything: what is left of a start is what this project does in it.

A kill costs the steps since the last whole checkpoint: an interval at most while a save takes less than a step, as with
--step-seconds 0.2; without it a save takes about as long as an interval, and may cost another.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn.functional
from rundir import different, newest, rows, tensors

from hvd_ddp.main import main as command

STEPS, INTERVAL, RANKS = 60, 7, 2
OPTIONS = ["--model", "factories:Wide", "--threads", "1", "--max-steps", str(STEPS), "--global-batch", "48",
           "--save-every", str(INTERVAL), "--keep", "2", "--optimizer", "adamw", "--weight-decay", "0.1",
           "--schedule", "cosine", "--warmup-steps", "6", "--ema", "0.9", "--log-every", "1",
           "--timeout", "30", "--start-timeout", "30"]  # fmt: skip
BACKENDS = ("ddp", "horovod")
PATIENCE = 90.0  # seconds for what should come within a few
START, SAVE = 2.0, 0.08  # seconds that a start and a save take at most, roughly: random moments are drawn from these


@dataclass
class Start:
    """Ranks that run."""

    folder: Path
    backend: str
    pids: list[int] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether all have left; reaps them."""
        for pid in list(self.pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.pids.remove(pid)
        return not self.pids

    @property
    def said(self) -> str:
        """Its last words."""
        return "\n" + Path(f"{self.folder}.log").read_text()[-3000:]

    def kill(self, *which: int) -> None:
        for pid in which or list(self.pids):
            os.kill(pid, signal.SIGKILL)

    def wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.ended:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"it does not end: {self.said}")
            time.sleep(0.005)


def start(folder: Path, backend: str) -> Start:
    """Fork the ranks; a launcher would have set these variables."""
    found = Start(folder, backend)
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            _be(rank, folder, backend)
        found.pids.append(pid)
    return found


def _be(rank: int, folder: Path, backend: str) -> None:
    code = 99
    try:
        log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.environ |= {"PALS_RANKID": str(rank), "PMI_SIZE": str(RANKS), "PALS_LOCAL_RANKID": str(rank),
                       "PALS_LOCAL_SIZE": str(RANKS), "PALS_NODEID": "0", "PALS_APID": "chaos"}  # fmt: skip
        code = command(["train", *OPTIONS, "--backend", backend, "--run-dir", str(folder)])
    finally:
        sys.stdout.flush()
        os._exit(code)


def whole(folder: Path) -> int:
    """The step of the newest checkpoint that fits its hash; 0 without one."""
    for path in sorted((folder / "checkpoints").glob("step_*.pt"), reverse=True):
        hash_file = Path(f"{path}.sha256")
        if hash_file.exists() and hash_file.read_text().split()[:1] == [hashlib.sha256(path.read_bytes()).hexdigest()]:
            return int(path.stem.removeprefix("step_"))
    return 0


@dataclass
class Kill:
    """What one did."""

    moment: str
    backend: str
    step: int  # the last that was trained
    kept: int  # the newest whole checkpoint
    left: str  # what it left of a save


def temporaries(folder: Path) -> set[str]:
    """Files that are being written, or were when their writer was killed."""
    try:
        return {name for name in os.listdir(folder / "checkpoints") if name.endswith(".tmp")}
    except OSError:
        return set()


def left_of_a_save(folder: Path, names: set[str]) -> str:
    """What these temporaries tell."""
    if any(".sha256." in name for name in names):
        return "half a hash"
    hashes = {path.name for path in (folder / "checkpoints").glob("*.sha256")}
    halves = ["a hash and half a file" if name.split(".pt")[0] + ".pt.sha256" in hashes else "half a file"
              for name in names]  # fmt: skip
    return halves[0] if halves else "nothing"


def wait_for_moment(job: Start, moment: str, chance: random.Random) -> None:
    """Until it is time to kill, or the ranks have ended."""
    deadline = time.monotonic() + PATIENCE
    if moment == "start":
        until = time.monotonic() + chance.uniform(0, START)
        while not job.ended and time.monotonic() < until:
            time.sleep(0.001)
        return
    begun = len(rows(job.folder, "train"))
    more = chance.randrange(1, 2 * INTERVAL)
    saves = chance.randrange(2)
    while not job.ended and time.monotonic() < deadline:
        if moment == "step" and len(rows(job.folder, "train")) >= begun + more:
            time.sleep(chance.uniform(0, 0.02))
            return
        if moment == "save" and temporaries(job.folder):
            if saves == 0:
                time.sleep(chance.uniform(0, SAVE))
                return
            saves -= 1
            while temporaries(job.folder) and not job.ended:
                time.sleep(0.001)
        time.sleep(0.0005)


def life(folder: Path, num_kills: int, chance: random.Random) -> list[Kill]:
    """One run, killed so often or until it is done; then it is let be, and is done."""
    kills: list[Kill] = []
    while True:
        kept, resumed, trained = whole(folder), len(rows(folder, "resume")), len(rows(folder, "train"))
        before, backend = temporaries(folder), chance.choice(BACKENDS)
        job = start(folder, backend)
        moment = "let be" if len(kills) == num_kills else chance.choice(["start", "step", "save"])
        if moment != "let be":
            wait_for_moment(job, moment, chance)
        killed = moment != "let be" and not job.ended
        if killed:
            job.kill(*([chance.choice(job.pids)] if chance.random() < 0.1 else []))  # or one, and the other notices
        job.wait()
        later = rows(folder, "resume")[resumed:]
        assert [row["step"] for row in later] in ([], [kept] if kept else []), f"{later}, not from {kept}: {job.said}"
        if not killed:
            break
        step = max([row["step"] for row in rows(folder, "train")[trained:]], default=kept)
        kills.append(Kill(moment, backend, step, whole(folder), left_of_a_save(folder, temporaries(folder) - before)))
        assert step - whole(folder) <= 2 * INTERVAL, kills[-1]  # the one before the save that was being written
    assert newest(folder)["progress"]["step"] == STEPS, f"it did not come to its end: {job.said}"
    assert not temporaries(folder), "of dead writers"
    return kills


def everything(folder: Path) -> dict[str, Any]:
    state = newest(folder)
    best = {f"best.{name}": torch.tensor(value) for name, value in state["decisions"]["best"].items()}
    return tensors(state) | best | {f"ema.{name}": value for name, value in state["ema"].items()}


def chaos(folder: Path, num_kills: int, seed: int) -> list[Kill]:
    """So many kills, some ten a run; AssertionError where something is not as promised."""
    job = start(folder / "undisturbed", "ddp")
    job.wait()
    wanted = everything(folder / "undisturbed")
    kills: list[Kill] = []
    for number in range(10**9):
        if len(kills) >= num_kills:
            return kills
        run = folder / f"run{number}"
        kills += life(run, min(10, num_kills - len(kills)), random.Random(f"{seed}/{number}"))
        assert different(everything(run), wanted) == [], run
    return kills


def table(kills: list[Kill]) -> str:
    """A row a kind of moment and backend."""
    lines = [
        "| killed | under | kills | left half a save | steps lost, median | most | more than an interval |",
        "|---|---|---|---|---|---|---|",
    ]
    for moment, backend in sorted({(kill.moment, kill.backend) for kill in kills}):
        these = [kill for kill in kills if (kill.moment, kill.backend) == (moment, backend)]
        lost = [kill.step - kill.kept for kill in these]
        halves = sum(kill.left != "nothing" for kill in these)
        lines.append(
            f"| in a {moment} | {backend} | {len(these)} | {halves} | {statistics.median(lost):g} | {max(lost)} "
            f"| {sum(steps > INTERVAL for steps in lost)} |"
        )
    return "\n".join([*lines, f"left of saves: {dict(Counter(kill.left for kill in kills))}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    os.environ["STEP_SECONDS"] = str(arguments.step_seconds)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kills = chaos(Path(folder), arguments.kills, arguments.seed)
    print(
        f"{len(kills)} kills in {time.monotonic() - began:.0f} s, a save every {INTERVAL} of {STEPS} steps, "
        f"which take {arguments.step_seconds:g} s more"
    )
    print(table(kills))


if __name__ == "__main__":
    main()
