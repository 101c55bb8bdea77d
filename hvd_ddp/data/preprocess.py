"""From pixels to what the model is shown: augmented and normalised, as whole batches, on the device."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from hvd_ddp.data.augment import Augmentation
from hvd_ddp.data.fused import Fused

log = logging.getLogger(__name__)


class Preprocess:
    """Makes inputs in `dtype` from uint8 (N, C, H, W) or floating-point (N, ...) on `device`; int64 stays int64.

    `mean` and `std` are per channel, in pixel units; floating-point samples are only converted. What a sample comes out
    as does not depend on its batch, bit for bit: a conversion, a subtraction and a division for each pixel, each
    rounded as IEEE 754 says. Raises ValueError for numbers that make no sense.
    """

    def __init__(
        self,
        augment: Augmentation | None,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if not dtype.is_floating_point or any(value <= 0 for value in std):
            raise ValueError(f"dtype is {dtype}, std {tuple(std)}: need a floating-point dtype and stds above 0")
        self.device, self.dtype = device, dtype
        self._mean = torch.tensor(mean, dtype=dtype, device=device).view(-1, 1, 1)
        self._std = torch.tensor(std, dtype=dtype, device=device).view(-1, 1, 1)
        self._augment = augment
        self._fused = None if augment is None or device.type != "cpu" else self._fuse(augment)

    @property
    def augments(self) -> bool:
        """Whether images for training look otherwise than for evaluation."""
        return self._augment is not None

    def training(self, images: Tensor, chosen: Tensor, samples: Tensor, epoch: int) -> Tensor:
        """The `images` at `chosen`, int64 (n,), as training sees them; `samples`, int64 (n,), are their numbers."""
        if self._augment is None:
            return self.evaluation(images.index_select(0, chosen))
        height, width = images.shape[2:]
        draws = self._augment.draw(samples, epoch, height=height, width=width)
        if self._fused is None:
            return self._augment.look(images, chosen, draws, self.evaluation)
        return self._fused(images, chosen, draws)

    def evaluation(self, images: Tensor) -> Tensor:
        """A new tensor in the dtype of training; uint8 (n, C, H, W) is normalised, other numbers (n, ...) are not."""
        if images.dtype != torch.uint8:
            return images.to(in_training(images.dtype, self.dtype), copy=True)
        return images.to(self.dtype).sub_(self._mean).div_(self._std)

    def targets(self, targets: Tensor) -> Tensor:
        """In the dtype of training where they are floating-point."""
        return targets.to(in_training(targets.dtype, self.dtype))

    def _fuse(self, augment: Augmentation) -> Fused | None:
        values = torch.arange(256, dtype=torch.uint8, device="cpu").expand(1, len(self._mean), 1, 256)
        try:
            return Fused(augment, self.evaluation(values)[0, :, 0])
        except ImportError as error:
            log.warning("numba can't be imported (%s): images are augmented by torch, which is slower", error)
            return None


def in_training(dtype: torch.dtype, training: torch.dtype) -> torch.dtype:
    """What inputs or targets of that dtype are for the model: whole numbers other than pixels stay what they are."""
    return torch.int64 if dtype == torch.int64 else training
