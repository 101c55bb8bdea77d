r"""A loss of your own: a language model of characters, which learns the English of Python's own documentation.

    python -m hvd_ddp --task hvd_ddp.examples.own_task:NextCharacter --data hvd_ddp.examples.own_task:text \
        --model hvd_ddp.examples.own_task:Network --global-batch 32 --lr 0.005 --max-steps 150

and the same behind `torchrun --nproc-per-node 2 -m`, `horovodrun -np 2 python -m` or `srun -n 2 python -m`. Copied to a
file `mine.py` in the working directory the names are `mine:NextCharacter` and so on.
"""

import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from hvd_ddp.data.loader import Batch

LENGTH = 48  # characters that a sample has
SIZE = 3000  # samples


class NextCharacter:
    """A sample is a piece of text, (LENGTH,) int64, its target the same piece one character on."""

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy of a sample's characters, in nats, on average: (n,)."""
        outputs = model(batch.inputs)  # (n, LENGTH, 256)
        return functional.cross_entropy(outputs.transpose(1, 2), batch.targets, reduction="none").mean(1)

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums over samples: they are divided by the number of samples of all ranks."""
        loss = self.losses(model, batch).double().sum()
        return {"loss": loss, "bits_per_character": loss / math.log(2)}


class Network(nn.Module):
    """Characters, (n, LENGTH) int64, to a number for each one that may follow, (n, LENGTH, num_characters)."""

    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, 48)
        self.memory = nn.GRU(48, 96, batch_first=True)
        self.output = nn.Linear(96, num_characters)

    def forward(self, characters: Tensor) -> Tensor:
        states, _ = self.memory(self.embedding(characters))
        outputs: Tensor = self.output(states)
        return outputs


def text(data_dir: Path | None) -> tuple[TensorDataset, TensorDataset, int]:
    """Pieces of what `help()` knows, a tenth of them for evaluation; 256 characters, since bytes are taken for them."""
    pieces = torch.frombuffer(bytearray(" ".join(topics.values()), "utf-8"), dtype=torch.uint8)[: SIZE * LENGTH + 1]
    inputs, targets = (part.view(SIZE, LENGTH).long() for part in (pieces[:-1], pieces[1:]))
    cut = SIZE * 9 // 10
    return TensorDataset(inputs[:cut], targets[:cut]), TensorDataset(inputs[cut:], targets[cut:]), 256
