"""Random crop, flip and cutout of whole batches; how a sample looks follows from (seed, epoch, sample) alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_ddp.config import AugmentName
from hvd_ddp.data.arrays import Data
from hvd_ddp.data.hashing import GOLDEN, key, mix

DRAWS = ("top", "left", "flip", "cut_y", "cut_x")
_RESERVED = 16  # draws a sample, so that a new one leaves those before it as they are
_NO_FLIP = ("digits",)  # sets in which the mirror image of a sample is of another class, or of none


@dataclass(frozen=True)
class Augmentation:
    """What is done to training images; the order is that of torchvision: crop, flip, normalise, cutout.

    `padding` is zero pixels added above and below, left and right, before a window of the image's own size is cut out;
    `flip` mirrors half of the samples left to right; `cutout` is the side of a square around a random pixel that is
    set to the mean after normalising (DeVries, Taylor 2017), 0 for none. Raises ValueError for a number below 0.
    """

    seed: int
    padding: tuple[int, int] = (0, 0)
    flip: bool = False
    cutout: int = 0

    def __post_init__(self) -> None:
        if min(*self.padding, self.cutout) < 0:
            raise ValueError(f"padding is {self.padding}, cutout {self.cutout}: neither may be below 0")

    def draw(self, samples: Tensor, epoch: int, *, height: int, width: int) -> Tensor:
        """The random numbers of `samples`, int64 (n,): int64 (n, 5) on their device, in the order of DRAWS.

        `top` and `left` say where in the padded image the crop begins, `flip` is 0 or 1, (`cut_y`, `cut_x`) is the
        pixel in the middle of the cutout. Draw d of sample i is number i * 16 + d of the splitmix64 stream that begins
        at a hash of (seed, epoch); its upper 32 bits are scaled to the range.
        """
        rows, columns = self.padding
        ranges = [2 * rows + 1, 2 * columns + 1, 2 if self.flip else 1, height, width]
        numbers = samples[:, None] * _RESERVED + torch.arange(1, len(DRAWS) + 1, device=samples.device)
        hashed = mix(numbers * GOLDEN + key(f"hvd_ddp augment {self.seed} {epoch}"))
        return ((hashed >> 32) & (2**32 - 1)) * torch.tensor(ranges, device=samples.device) >> 32

    def look(self, images: Tensor, samples: Tensor, draws: Tensor, normalise: Callable[[Tensor], Tensor]) -> Tensor:
        """The samples of `images`, uint8 (N, C, H, W), normalised, as their draws say, on any device.

        `hvd_ddp.data.fused` does the same in one pass on a CPU, and is compared with this bit for bit.
        """
        _, channels, height, width = images.shape
        top, left, flip, cut_y, cut_x = draws[:, :, None].unbind(1)  # (n, 1) each
        y, x = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
        rows = y + top - self.padding[0]
        columns = torch.where(flip == 1, width - 1 - x, x) + left - self.padding[1]
        inside = _within(rows, 0, height)[:, None, :, None] & _within(columns, 0, width)[:, None, None, :]
        crops = images[
            samples[:, None, None, None],
            torch.arange(channels, device=images.device)[:, None, None],
            rows.clamp(0, height - 1)[:, None, :, None],
            columns.clamp(0, width - 1)[:, None, None, :],
        ]
        looks = normalise(crops * inside)
        if self.cutout:
            first_y, first_x = cut_y - self.cutout // 2, cut_x - self.cutout // 2
            cut_rows, cut_columns = (_within(y, first_y, self.cutout), _within(x, first_x, self.cutout))
            looks.masked_fill_(cut_rows[:, None, :, None] & cut_columns[:, None, None, :], 0.0)
        return looks


def choose(name: AugmentName, data: Data, *, seed: int) -> Augmentation | None:
    """What --augment stands for.

    `standard` pads by an eighth of each side, rounded, which is the usual 4 for images of 32 and of 28 pixels and 1
    for the 8 of digits; and it flips, but for digits, where a mirrored 2 is no 2. The shoes of fashion_mnist all point
    to the left, but one that points to the right is a shoe still. Folders of pictures do their own when they are read.
    """
    if name == "none" or data.train.augments:
        return None
    _, height, width = data.image_shape
    return Augmentation(seed, ((height + 4) // 8, (width + 4) // 8), flip=data.name not in _NO_FLIP)


def _within(numbers: Tensor, first: Tensor | int, count: int) -> Tensor:
    return (numbers >= first) & (numbers < first + count)
