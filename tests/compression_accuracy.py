"""What compressed gradients cost in accuracy on Fashion-MNIST: the recipe under each backend with each compression.

    python tests/compression_accuracy.py --epochs 2

Two ranks of one thread, the same seed: the same weights at the start, the same samples in the same order.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from launchers import command, environment
from rundir import summary

DATA = "/usr/share/datasets/fashion-mnist"
CASES = [
    ("ddp", "none"),
    ("ddp", "fp16"),
    ("ddp", "bf16"),
    ("ddp", "powersgd"),
    ("horovod", "none"),
    ("horovod", "fp16"),
]


def accuracy(backend: str, compression: str, options: list[str], folder: Path) -> float:
    """Percent of the test set, after the last epoch."""
    program = ["-m", "hvd_ddp", "train", "--config", "fashion_mnist", "--data-dir", DATA, "--threads", "1",
               "--backend", backend, "--compression", compression, "--run-dir", "run", *options]  # fmt: skip
    folder.mkdir()
    with (folder / "output").open("w") as output:
        subprocess.run(
            command("mpirun", 2, program), cwd=folder, env=environment(), check=True,
            timeout=3600, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    found: float = 100 * summary(folder / "run")["accuracy"]
    return found


def main(epochs: int, seeds: int) -> int:
    """Prints a line for each case; 1 if one loses more than 0.3 points to the same backend without compression."""
    print(f"{'backend':9}{'compression':13}{'accuracy, %':>12}{'to none, points':>17}", flush=True)
    plain: dict[str, float] = {}
    worst = 0.0
    for backend, compression in CASES:
        with tempfile.TemporaryDirectory() as folder:
            values = [
                accuracy(backend, compression, ["--epochs", str(epochs), "--seed", str(seed)], Path(folder) / str(seed))
                for seed in range(seeds)
            ]
        mean = sum(values) / len(values)
        difference = mean - plain.setdefault(backend, mean)
        worst = min(worst, difference)
        print(f"{backend:9}{compression:13}{mean:12.2f}{difference:+17.2f}", flush=True)
    print(f"{epochs} epochs, means of {seeds} seed(s), {os.cpu_count()} cores")
    return int(worst < -0.3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    sys.exit(main(arguments.epochs, arguments.seeds))
