"""How long training stands still for a save: `PYTHONPATH=. python tests/saving_cost.py [DIR]`, with checkpoints in DIR.

The model and Adam's state of ResNet-18, 134 MB, are saved in turn in two ways, a step of training before each: waiting
until the checkpoint is on the disk, and going on as soon as it is copied.
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

ROUNDS = 10


def main() -> None:
    torch.set_num_threads(1)
    model = build("resnet18", 10, (3, 32, 32))
    optimizer = torch.optim.Adam(model.parameters())
    stood: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        saver = Saver(Path(folder), keep=1, guard=lambda: None, saved=lambda saved: None, failed=lambda *_: None)
        for step in range(1, 2 * ROUNDS + 3):
            wait = step % 2 == 0
            nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.tensor([0, 1, 2, 3])).backward()
            optimizer.step()
            optimizer.zero_grad()
            began = time.perf_counter()
            saver.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            if wait:
                saver.finish()
            if step > 2:  # the first copy takes its memory
                stood[wait].append(1000 * (time.perf_counter() - began))
            saver.finish()
    for wait, times in stood.items():
        name = "waiting for the disk" if wait else "in the background"
        print(f"{name}: {statistics.median(times):.0f} ms ({min(times):.0f} to {max(times):.0f})")


if __name__ == "__main__":
    main()
