"""Models, data and options of the contract: small, and each made to bite. Used by the ranks and by the reference."""

import numpy as np
import torch
from torch import nn

STEPS = 30
NUM_CLASSES = 5


def arrays(num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """uint8 (N, 1, 6, 6) and classes; a few samples carry the mark that Overflowing looks for."""
    random = np.random.default_rng(7)
    images = random.integers(0, 200, (num_samples, 1, 6, 6), dtype=np.uint8)
    targets = random.integers(0, NUM_CLASSES, num_samples, dtype=np.int64)
    images[:, :, 0, 0] = 0
    images[[3, 11, 29], :, 0, 0] = 255
    return images, targets


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Tanh(), nn.Linear(24, NUM_CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Normed(nn.Module):
    """No bias before BatchNorm: its gradient would be rounding noise, which Adam makes as large as any other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, NUM_CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Dropout(0.3), nn.Linear(24, NUM_CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Branching(nn.Module):
    """`sometimes` serves marked samples only: no gradient on ranks (and in steps) without one. `never` serves none."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(36, NUM_CLASSES)
        self.sometimes = nn.Linear(36, NUM_CLASSES)
        self.never = nn.Linear(36, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        marked = x[:, 0, 0, 0] > 0
        x = x.flatten(1)
        out = self.base(x)
        if marked.any():
            out = out + torch.where(marked[:, None], self.sometimes(x), torch.zeros_like(out))
        return out


class Overflowing(Plain):
    """A marked sample's gradient does not fit fp16 at the first scales."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        marked = x[:, 0, 0, 0] > 0
        return super().forward(x) * torch.where(marked, 200.0, 1.0)[:, None]


MODELS = {cls.__name__: cls for cls in (Plain, Normed, Dropped, Branching, Overflowing)}

# name: (model, number of samples, options). 49 or 50 samples in batches of 16: the last batch has 1 or 2.
CASES = {
    "sgd_momentum_decay": ("Plain", 50, {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.02}),
    "one_sample_left": ("Plain", 49, {"optimizer": "sgd", "lr": 0.05, "label_smoothing": 0.1}),
    "adamw_clip_accumulate": (
        "Plain",
        50,
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.3, "clip_norm": 0.2, "accumulate": 3,
         "label_smoothing": 0.1, "schedule": "cosine", "warmup_steps": 5},
    ),
    "sgd_accumulate_clip": (
        "Plain", 49, {"optimizer": "sgd", "lr": 0.05, "clip_norm": 0.2, "accumulate": 3, "weight_decay": 0.02}
    ),
    "batch_norm": ("Normed", 49, {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.01}),
    "batch_norm_accumulate": ("Normed", 49, {"optimizer": "adamw", "lr": 0.003, "accumulate": 3}),
    "bf16": ("Plain", 50, {"optimizer": "sgd", "lr": 0.05, "precision": "bf16"}),
    "dropout": ("Dropped", 50, {"optimizer": "adam", "lr": 0.003}),
    "unused": (
        "Branching", 50,
        {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.1, "find_unused_parameters": True},
    ),
    "unused_accumulate": (
        "Branching", 49,
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "find_unused_parameters": True, "accumulate": 3},
    ),
    "overflow": ("Overflowing", 50, {"optimizer": "sgd", "lr": 0.001, "precision": "fp16"}),
    "fp64_sgd": (
        "Plain", 49,
        {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.02, "precision": "fp64", "clip_norm": 0.5, "accumulate": 2},
    ),
    "fp64_adamw": (
        "Plain", 50,
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "precision": "fp64", "label_smoothing": 0.1},
    ),
    "fp64_unused": (
        "Branching", 49,
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "precision": "fp64", "find_unused_parameters": True,
         "accumulate": 2},
    ),
    "fp64_sync_bn": (  # 52: the last step has a sample for each of 4 ranks
        "Normed", 52,
        {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.01, "precision": "fp64", "clip_norm": 0.5, "sync_bn": True},
    ),
    "fp32_sgd": ("Plain", 50, {"optimizer": "sgd", "lr": 0.05, "weight_decay": 0.02}),
}  # fmt: skip
ONE_PROCESS = [
    "fp64_sgd",
    "fp64_adamw",
    "fp64_unused",
    "fp64_sync_bn",
    "fp32_sgd",
]  # compared with one process at any number of ranks
