"""A model and data of your own, with all that the trainer does: checkpoints, resume, logs, exact evaluation.

    torchrun --nproc-per-node 2 -m hvd_ddp.examples.own_model_and_data
    horovodrun -np 2 python -m hvd_ddp.examples.own_model_and_data
    srun -n 2 python -m hvd_ddp.examples.own_model_and_data

The same without `main`, with each option of train, in a file `mine.py` of yours: `python -m hvd_ddp --data mine:spirals
--model mine:Network`.
"""

from pathlib import Path

import torch
from torch import Tensor, nn, optim
from torch.utils.data import TensorDataset

from hvd_ddp import TrainConfig, Trainer, connect, own_data


class Network(nn.Sequential):
    """Points of the plane, (n, 2), to a number for each class, (n, num_classes)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_classes))


def spirals(data_dir: Path | None = None) -> tuple[TensorDataset, TensorDataset, int]:
    """Points on three arms, (n, 2) float32, and whose arm each is on, (n,) int64. Any map-style data set would do."""
    arms = torch.arange(2400) % 3
    radius = torch.rand(2400, generator=torch.Generator().manual_seed(0))
    angle = 4 * radius + arms * (2 * torch.pi / 3)
    points: Tensor = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
    return TensorDataset(points[:2000], arms[:2000]), TensorDataset(points[2000:], arms[2000:]), 3


def main() -> None:
    config = TrainConfig(epochs=8, global_batch=32, lr=0.01, run_dir=Path("runs/spirals"))
    with connect() as backend:  # DDP, Horovod or one process
        torch.manual_seed(config.seed)
        model = Network(3)
        optimizer = optim.Adam(model.parameters())  # the rate is the configuration's
        Trainer(config, model, optimizer, own_data(*spirals()), backend).fit()


if __name__ == "__main__":
    main()
