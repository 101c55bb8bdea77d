"""Data: packed folders, IDX files, CIFAR's archives, trees of pictures, and what ranks tell each other of them."""

import functools
import gzip
import io
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torchvision.datasets  # noqa: F401  here, not in the time of an example
from hypothesis import strategies as st

from fuzz.guard import fuzz
from fuzz.mutations import NAMES, changed, json_files, put, spoilt, strange
from hvd_ddp.data import datasets, image_folder, packed
from hvd_ddp.data.cifar import read_cifar
from hvd_ddp.data.fashion_mnist import load_fashion_mnist
from hvd_ddp.data.idx import read_idx

NAME = "synthetic:1x4x4:3:20"


@functools.cache
def pack() -> dict[str, bytes]:
    """The files of a packed folder."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.packed"
        packed.write(datasets.find(NAME).read(None), path, sources={})
        return {file.name: file.read_bytes() for file in path.iterdir()}


def npy(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=False)
    return buffer.getvalue()


def header(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + b"\0" * 64


HEADERS = [
    header(b"{'descr': '|O', 'fortran_order': False, 'shape': (3,)}"), header(b"(" * 5000), header(b"-" * 5000),
    header(b"{'descr': '<i8', 'fortran_order': False, 'shape': (" + b"9" * 18 + b",)}"), header(b"1e999"),
    header(b"{'descr': '<i8', 'fortran_order': False, 'shape': (-1,)}"), header(b"{'descr': '<i8'}"), header(b"\0"),
    header(b"{'descr': [('a', '<i8', (1000,) * 9)], 'fortran_order': False, 'shape': ()}"), header(b"'''"),
    npy(np.zeros(22, np.int64)), npy(np.zeros((2, 1, 4, 4), np.uint8)), npy(np.zeros((22, 1, 4, 4), np.float64)),
    npy(np.full(20, 7)), npy(np.full(20, -1)), npy(np.zeros(20, "datetime64[s]")), npy(np.zeros(20, ">i8")),
]  # fmt: skip


@fuzz(
    80,
    [b"{" * 90_000, b"null", b"[]", b'{"format": 1, "arrays": 3}', b'{"format": [' * 20_000],
    manifest=st.deferred(lambda: json_files(json.loads(pack()["manifest.json"]))),
    array=st.sampled_from(packed.ARRAYS),
    content=st.one_of(
        st.none(), st.sampled_from(HEADERS), strange, st.deferred(lambda: spoilt(pack()["train_targets.npy"]))
    ),
    honest=st.booleans(),
)
def test_packed(folder: Path, manifest: bytes, array: str, content: Any, honest: bool) -> None:
    """A spoilt manifest, a spoilt array, or both, with sizes and hashes that fit."""
    path = packed.path_of(NAME, folder / "inside")
    path.mkdir()
    for name, file in pack().items():
        (path / name).write_bytes(file)
    if content is not None:
        (path / f"{array}.npy").unlink()
        put(path / f"{array}.npy", content, folder)
        if honest and isinstance(content, bytes):
            manifest = honest_manifest(array, content)
    (path / "manifest.json").write_bytes(manifest)
    data = packed.load(path, NAME)
    assert data is not None
    assert data.train.images.sum() >= 0
    (folder / "inside" / "stage").mkdir()
    datasets.stage(NAME, folder / "inside", folder / "inside" / "stage")
    datasets.load_staged(NAME, folder / "inside" / "stage")


def honest_manifest(array: str, content: bytes) -> bytes:
    """As an attacker would write it."""
    import hashlib

    manifest = json.loads(pack()["manifest.json"])
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    try:
        value = np.load(io.BytesIO(content), allow_pickle=False)
        entry |= {"dtype": str(value.dtype), "shape": list(value.shape)}
    except Exception:
        entry |= {"dtype": "int64", "shape": [20]}
    manifest["arrays"][array] = entry
    return json.dumps(manifest).encode()


@fuzz(
    20,
    ["image_folder:../x", "../cifar10", "synthetic:1x1x1:1:1/../../x", "cifar10/../../x"],
    name=st.one_of(
        st.sampled_from(NAMES).map(lambda name: f"synthetic:{name}"), st.sampled_from(NAMES), st.text(max_size=9)
    ),
)
def test_names(folder: Path, name: str) -> None:
    datasets.prepare(name, folder / "inside")


def idx(*shape: int, kind: int = 8, values: bytes | None = None) -> bytes:
    head = b"\0\0" + bytes([kind, len(shape)]) + b"".join(struct.pack(">I", size % 2**32) for size in shape)
    return head + (bytes(int(np.prod(shape))) if values is None else values)


IDX = [idx(20), idx(20, 4, 4), idx(0), idx(2**31, 2, 2, values=b""), idx(2**32 - 1, 2**32 - 1, 2**32 - 1, values=b""),
       gzip.compress(idx(20)), gzip.compress(idx(20))[:-9], gzip.compress(b"\0" * 100_000_000)]  # fmt: skip


@fuzz(
    40,
    IDX,
    content=st.one_of(spoilt(IDX[0]), spoilt(IDX[1]), spoilt(IDX[5]), spoilt(IDX[1]).map(gzip.compress), strange),
    kind=st.sampled_from(["labels", "images"]),
)
def test_idx(folder: Path, content: Any, kind: Any) -> None:
    path = folder / "inside" / "x-idx"
    put(path, content, folder)
    assert len(read_idx(path, kind)) > 0


FASHION = {"train-images-idx3-ubyte": idx(20, 4, 4), "train-labels-idx1-ubyte": idx(20),
           "t10k-images-idx3-ubyte": idx(10, 4, 4), "t10k-labels-idx1-ubyte": idx(10)}  # fmt: skip


@fuzz(20, name=st.sampled_from(sorted(FASHION)), what=st.one_of(strange, st.none(), st.sampled_from(IDX)))
def test_fashion_mnist(folder: Path, name: str, what: Any) -> None:
    for each, content in FASHION.items():
        put(folder / "inside" / each, what if each == name else content, folder)
    load_fashion_mnist(folder / "inside")


@fuzz(20, what=st.one_of(strange, st.binary(max_size=50)), name=st.sampled_from(["data_batch_1", "batches.meta"]))
def test_cifar(folder: Path, what: Any, name: str) -> None:
    """With archives that would run something, were they unpickled or unpacked."""
    below = folder / "inside" / "cifar-10-batches-py"
    below.mkdir()
    for each in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"]:
        (below / each).write_bytes(b"cos\nsystem\n(S'touch ../../outside'\ntR.")
    (below / name).unlink()
    put(below / name, what, folder)
    (folder / "inside" / "cifar-10-python.tar.gz").write_bytes(b"\x1f\x8b")
    read_cifar("cifar10", folder / "inside")


@functools.cache
def pictures() -> dict[str, bytes]:
    from PIL import Image

    picture = Image.fromarray(np.arange(300, dtype=np.uint8).reshape(10, 10, 3))
    made = {}
    for kind in ("JPEG", "PNG", "BMP", "TIFF", "WEBP", "PPM", "GIF"):
        buffer = io.BytesIO()
        picture.save(buffer, kind)
        made[kind] = buffer.getvalue()
    return made


def huge(width: int, height: int) -> bytes:
    """A PNG that announces so many pixels."""
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    start = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + start + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(outside) (w) file closefile\nshowpage\n%%EOF\n"
BROKEN = [
    POSTSCRIPT,
    huge(2**31 - 1, 2**31 - 1),
    huge(60_000, 60_000),
    huge(0, 0),
    huge(20_000, 1),
    b"",
    b"\xff\xd8\xff",
]


@fuzz(
    60,
    BROKEN,
    content=st.one_of(
        strange, st.deferred(lambda: st.sampled_from(sorted(pictures())).flatmap(lambda k: spoilt(pictures()[k])))
    ),
    name=st.sampled_from(["x.jpg", "y.PNG", ".jpg", "a\nb.jpg", "\udcff.jpg", "-.bmp", " .webp", "~.tif"]),
    augment=st.booleans(),
)
def test_pictures(folder: Path, content: Any, name: str, augment: bool) -> None:
    root = folder / "inside"
    for part in ("train", "val"):
        (root / part / "c").mkdir(parents=True)
        (root / part / "c" / "good.png").write_bytes(pictures()["PNG"])
    put(root / "train" / "c" / name, content, folder)
    found = image_folder._list(root)
    data = image_folder._open("image_folder:8", 8, root, found)
    for index in range(len(data.train)):  # type: ignore[arg-type]
        data.train.read(index, index, augment=augment)  # type: ignore[union-attr]


@fuzz(20, where=st.sampled_from(["train", "val", "train/c", "train/d", "val/c", "train/c/deep"]), what=strange)
def test_trees(folder: Path, where: str, what: Any) -> None:
    root = folder / "inside"
    for part in ("train", "val"):
        (root / part / "c").mkdir(parents=True)
        (root / part / "c" / "good.png").write_bytes(pictures()["PNG"])
    path = root / where
    if path.is_dir():
        path.rename(root / "away")
    put(path, what, folder)
    data = image_folder._open("image_folder:8", 8, root, image_folder._list(root))
    image_folder._verify(data, packed.silent)


SURVEY = {"classes": ["a", "b"], "counts": [[2, 1], [1, 1]]}
FILES = b"a/1.png\0a/2.png\0b/1.png\0a/3.png\0b/2.png\0"
OUTWARDS = [FILES.replace(b"a/2.png", name) for name in (b"../../outside", b"/etc/passwd", b"a/../../../x", b"..")]


@fuzz(60, [SURVEY, {**SURVEY, "counts": [[10**12, 1], [1, 1]]}], survey=changed(SURVEY),
      names=st.one_of(spoilt(FILES), st.just(FILES), st.sampled_from(OUTWARDS)))  # fmt: skip
def test_what_rank_0_has_found(folder: Path, survey: Any, names: bytes) -> None:
    """The survey of a tree, as it comes over collectives that anybody on the network may have a word in."""
    root = (folder / "inside").resolve()
    found = json.dumps(survey).encode() + b"\n" + names
    data = image_folder._open("image_folder:8", 8, root, found)
    for part in (data.train, data.eval):
        for index in range(len(part)):  # type: ignore[arg-type]
            assert Path(os.path.normpath(part.path(index))).is_relative_to(root)  # type: ignore[union-attr]
