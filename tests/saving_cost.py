"""How long training stands still for a save: `PYTHONPATH=. python tests/saving_cost.py [DIR]`.

ResNet-18 (45 MB) with Adam is trained by one process with one thread, the same steps again and again in three ways, in
turn: without saving, with each save waited for, with saves in the background. The state is 134 MB.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from hvd_ddp.models import build
from hvd_ddp.saving import Saver

STEPS, EVERY, ROUNDS = 20, 10, 5


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, saver: Saver | None, *, wait: bool) -> list[float]:
    """Train; seconds in all, and seconds for each save."""
    inputs, targets = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    began, stood = time.perf_counter(), []
    for step in range(1, STEPS + 1):
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if saver is not None and step % EVERY == 0:
            now = time.perf_counter()
            saver.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            if wait:
                saver.finish()
            stood.append(time.perf_counter() - now)
    if saver is not None:
        saver.finish()
    return [time.perf_counter() - began, *stood]


def main() -> None:
    torch.set_num_threads(1)
    model = build("resnet18", 10, (3, 32, 32))
    optimizer = torch.optim.Adam(model.parameters())
    found: dict[str, list[list[float]]] = {"no saves": [], "waited for": [], "in the background": []}
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        saver = Saver(Path(folder), keep=1, guard=lambda: None, saved=lambda saved: None, failed=lambda *_: None)
        steps(model, optimizer, saver, wait=True)
        for _ in range(ROUNDS):
            for name, times in found.items():
                times.append(steps(model, optimizer, None if name == "no saves" else saver, wait=name == "waited for"))
    print(f"| saves, one every {EVERY} steps | ms that training stands still | all {STEPS} steps, s |\n|---|---|---|")
    for name, times in found.items():
        stood = [one for row in times for one in row[1:]]
        still = f"{1000 * statistics.median(stood):.0f} (most {1000 * max(stood):.0f})" if stood else "0"
        print(f"| {name} | {still} | {statistics.median(row[0] for row in times):.2f} |")


if __name__ == "__main__":
    main()
