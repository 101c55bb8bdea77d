"""A model for --model recorder:Recorder that writes down what it is shown."""

import hashlib
import json

import torch
from torch import nn

from hvd_ddp.job.launch import detect


class Recorder(nn.Module):
    """Each training forward leaves a line with the hash of each sample, in the working directory, a file a rank."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, num_classes)
        self.file = f"seen-{detect().rank}.jsonl"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with open(self.file, "a") as file:
                file.write(json.dumps(hashes(x)) + "\n")
        return self.layer(x.flatten(1))


def hashes(batch: torch.Tensor) -> list[str]:
    return [hashlib.blake2b(sample.numpy().tobytes(), digest_size=12).hexdigest() for sample in batch]
