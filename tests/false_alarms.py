"""Runs on a machine whose cores are busy, with a short --timeout: none may be taken for one that hangs or has died.

    python tests/false_alarms.py --runs 100

Two processes a core do nothing but compute beside each run; backends take turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launchers import ROOT, command, environment
from rundir import summary

TIMEOUT = 8  # seconds, as in the tests of failures; 300 by default
LAUNCHERS = (("--nproc", "ddp"), ("mpirun", "horovod"), ("horovodrun --gloo", "horovod"), ("torchrun", "ddp"))


def run(number: int, folder: Path) -> str:
    """Sixty steps on two ranks, with an evaluation and saves; what was said, if it did not end well."""
    launcher, backend = LAUNCHERS[number % len(LAUNCHERS)]
    program = ["-m", "hvd_ddp", "train", "--threads", "1", "--model", "factories:Small", "--backend", backend,
               "--run-dir", "run", "--max-steps", "60", "--save-every", "10", "--timeout", str(TIMEOUT)]  # fmt: skip
    result = subprocess.run(
        command(launcher, 2, program), cwd=folder, capture_output=True, text=True, timeout=300,
        env=environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}"),
    )  # fmt: skip
    well = result.returncode == 0 and summary(folder / "run")["status"] == "finished"
    return "" if well else f"{launcher}, {backend}: {result.stdout[-500:]}{result.stderr[-1500:]}"


def main(num_runs: int) -> int:
    """Prints how many ended well; 1 if one did not."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    wrong, began = 0, time.monotonic()
    try:
        for number in range(num_runs):
            with tempfile.TemporaryDirectory() as folder:
                if said := run(number, Path(folder)):
                    wrong += 1
                    print(said, flush=True)
    finally:
        for process in busy:
            process.kill()
    seconds = time.monotonic() - began
    load = os.getloadavg()[1]
    print(f"{num_runs} runs with --timeout {TIMEOUT} at a load of {load:.0f}: {wrong} false alarms, {seconds:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    sys.exit(main(parser.parse_args().runs))
