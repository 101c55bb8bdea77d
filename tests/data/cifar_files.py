"""CIFAR's files in exactly its format, but smaller and of noise; the real ones can't be had without a network."""

import hashlib
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from torchvision import datasets


def write(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str = "cifar10", *, num: int = 20, archive: bool = False
):
    """Write the batches (or their tar.gz) and make torchvision expect their checksums; the images and classes.

    A batch is a pickled dict: "data" uint8 (n, 3072), red, green and blue planes of 32 rows of 32; "labels", or
    "fine_labels" and "coarse_labels"; "filenames"; "batch_label". Returns uint8 (N, 3, 32, 32) and classes, by part.
    """
    kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    below = folder / kind.base_folder
    below.mkdir(parents=True)
    random = np.random.default_rng(0)
    num_classes = int(name.removeprefix("cifar"))
    parts = []
    for attribute in ("train_list", "test_list"):
        images, targets, listed = [], [], []
        for file, _ in getattr(kind, attribute):
            data = random.integers(0, 256, (num, 3072), dtype=np.uint8)
            labels = random.integers(0, num_classes, num).tolist()
            batch = {"data": data, "filenames": [f"{n}.png" for n in range(num)], "batch_label": file}
            batch |= {"labels": labels} if name == "cifar10" else {"fine_labels": labels, "coarse_labels": labels}
            listed.append([file, _dump(below / file, batch)])
            images.append(data.reshape(-1, 3, 32, 32))
            targets += labels
        monkeypatch.setattr(kind, attribute, listed)
        parts.append((np.concatenate(images), targets))
    names = {kind.meta["key"]: [f"class {number}" for number in range(num_classes)]}
    checksum = _dump(below / kind.meta["filename"], names)
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": checksum})
    if archive:
        path = folder / kind.filename
        with tarfile.open(path, "w:gz") as tar:
            tar.add(below, kind.base_folder)
        for file in below.iterdir():
            file.unlink()
        below.rmdir()
        monkeypatch.setattr(kind, "tgz_md5", hashlib.md5(path.read_bytes()).hexdigest())
    return parts


def _dump(path: Path, value: object) -> str:
    content = pickle.dumps(value, protocol=2)
    path.write_bytes(content)
    return hashlib.md5(content).hexdigest()
