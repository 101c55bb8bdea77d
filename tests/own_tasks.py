"""Tasks, models and data for --task own_tasks:NAME and the like."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset


class Segmentation:
    """A class for each pixel: outputs (n, classes, H, W), masks (n, H, W)."""

    def losses(self, model, batch):
        return functional.cross_entropy(model(batch.inputs), batch.targets, reduction="none").mean((1, 2))

    def evaluate(self, model, batch):
        outputs = model(batch.inputs)
        return {
            "loss": functional.cross_entropy(outputs, batch.targets, reduction="none").mean((1, 2)).double().sum(),
            "pixels": (outputs.argmax(1) == batch.targets).double().mean((1, 2)).sum(),
        }


class WithPredict(Segmentation):
    def predict(self, model, batch):
        return {
            "name": [f"sample of {n}" for n in batch.targets.sum((1, 2)).tolist()],
            "sum": batch.inputs.sum((1, 2, 3)),
        }


class Regression:
    """One number a sample."""

    def losses(self, model, batch):
        return functional.mse_loss(model(batch.inputs)[:, 0], batch.targets, reduction="none")

    def evaluate(self, model, batch):
        return {"loss": self.losses(model, batch).double().sum()}


class Pixels(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, num_classes, 3, padding=1))


class Line(nn.Linear):
    def __init__(self, num_classes):
        assert num_classes is None
        super().__init__(3, 1)


class Rows(Dataset):
    """A TensorDataset that is read item by item."""

    def __init__(self, tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors)

    def __getitem__(self, index):
        return self.tensors[index]


def squares(num, seed):
    """uint8 (num, 1, 8, 8) with a bright square, and int64 (num, 8, 8) with its place."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 60, (num, 1, 8, 8), generator=generator)
    masks = torch.zeros(num, 8, 8, dtype=torch.int64)
    for image, mask, (y, x) in zip(
        images, masks, torch.randint(0, 5, (num, 2), generator=generator).tolist(), strict=True
    ):
        image[:, y : y + 3, x : x + 3] += 150
        mask[y : y + 3, x : x + 3] = 1
    return TensorDataset(images.to(torch.uint8), masks)


def masks(data_dir):
    return squares(120, 0), squares(31, 1), 2


def masks_one_by_one(data_dir):
    return Rows(squares(120, 0)), Rows(squares(31, 1)), 2


def masks_without_number(data_dir):
    return squares(12, 0), squares(12, 1)


def numbers(data_dir):
    inputs = torch.randn(90, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs @ torch.tensor([1.0, -2.0, 0.5]))
    return data, data


# Tasks with one fault each, on the digits


class Good:
    def losses(self, model, batch):
        return functional.cross_entropy(model(batch.inputs), batch.targets, reduction="none")

    def evaluate(self, model, batch):
        return {"loss": self.losses(model, batch).sum()}


class WithoutEvaluate:
    losses = Good.losses


class NeedsWords(Good):
    def __init__(self, words):
        pass


class Mean(Good):
    def losses(self, model, batch):
        return super().losses(model, batch).mean()


class Whole(Good):
    def losses(self, model, batch):
        return (model(batch.inputs).argmax(1) == batch.targets).long()


class Number(Good):
    def losses(self, model, batch):
        return super().losses(model, batch).tolist()


class Detached(Good):
    def losses(self, model, batch):
        return super().losses(model, batch).detach()


class WithoutLoss(Good):
    def evaluate(self, model, batch):
        return {"accuracy": torch.tensor(1)}


class NoDict(Good):
    def evaluate(self, model, batch):
        return super().losses(model, batch).sum()


class NoScalar(Good):
    def evaluate(self, model, batch):
        return {"loss": super().losses(model, batch)}


class Taken(Good):
    def evaluate(self, model, batch):
        return {**super().evaluate(model, batch), "step": torch.tensor(1)}


class LaterWrong(Good):
    """Right for two samples alone."""

    def losses(self, model, batch):
        losses = super().losses(model, batch)
        return losses if len(losses) == 2 else losses.mean()
