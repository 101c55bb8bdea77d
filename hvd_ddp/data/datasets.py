"""Names of data sets -> data. A new one is a file beside this one and a line in DATASETS."""

import difflib
from collections.abc import Callable
from pathlib import Path

from hvd_ddp.data.arrays import ArrayDataset, Data
from hvd_ddp.data.digits import load_digits
from hvd_ddp.data.fashion_mnist import load_fashion_mnist
from hvd_ddp.errors import HvdDDPError

__all__ = ["DATASETS", "ArrayDataset", "Data", "load"]

DATASETS: dict[str, Callable[[Path | None], Data]] = {
    "digits": load_digits,
    "fashion_mnist": load_fashion_mnist,
}


def load(name: str, data_dir: Path | None = None) -> Data:
    """The data set of that name; `data_dir` is where its files are, for those that need some.

    Raises HvdDDPError for an unknown name, and for files that are missing or damaged.
    """
    if name not in DATASETS:
        near = difflib.get_close_matches(name.lower().replace("-", "_"), DATASETS, n=1)
        guess = f" Did you mean `{near[0]}`?" if near else ""
        choices = ", ".join(f"`{choice}`" for choice in DATASETS)
        raise HvdDDPError(
            f"Data set `{name}` is unknown: nothing can be loaded.{guess} Use --data with one of {choices}."
        )
    return DATASETS[name](data_dir)
