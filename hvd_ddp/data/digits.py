"""The digits that ship in the package (DIGITS.md says where they come from)."""

import hashlib
import io
from pathlib import Path

import numpy as np

from hvd_ddp.data.arrays import ArrayDataset, Data
from hvd_ddp.errors import HvdDDPError

DIGITS_FILE = Path(__file__).with_name("digits.npz")
DIGITS_SHA256 = "db701606b8eeb67106ca668d225f2a876a4d0a925d179668973d3ed1bbcd7daa"


def load_digits(data_dir: Path | None = None) -> Data:
    """1,437 train and 360 eval images of 8x8 pixels, values 0..16, ten classes. `data_dir` is not needed.

    Raises HvdDDPError when the file in the package is missing or not the one that was shipped.
    """
    del data_dir
    fix = "The installation is damaged. Install hvd_ddp again."
    try:
        content = DIGITS_FILE.read_bytes()
    except OSError as error:
        raise HvdDDPError(f"The digits data `{DIGITS_FILE}` can't be read: `{error}`. {fix}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != DIGITS_SHA256:
        raise HvdDDPError(
            f"The digits data `{DIGITS_FILE}` has the SHA-256 `{found}`, the shipped file `{DIGITS_SHA256}`: "
            f"a run on it would not be comparable. {fix}"
        )
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        train = ArrayDataset(arrays["train_images"], arrays["train_targets"])
        evaluation = ArrayDataset(arrays["eval_images"], arrays["eval_targets"])
    return Data.measure("digits", train, evaluation, num_classes=10)
