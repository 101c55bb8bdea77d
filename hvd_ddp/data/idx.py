"""IDX files, the format of MNIST and Fashion-MNIST (http://yann.lecun.com/exdb/mnist/).

Two zero bytes, a byte for the type (8: unsigned bytes), a byte for the number of dimensions, the size of each as a
big-endian uint32, then the values in row-major order.
"""

import gzip
import io
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.outside import open_regular

Kind = Literal["labels", "images"]
_NUM_DIMENSIONS: dict[Kind, int] = {"labels": 1, "images": 3}
_MAX_VALUES = 1 << 31
_DEFLATE_RATIO = 1032  # the most that deflate can shrink, https://zlib.net/zlib_tech.html
_AGAIN = "Fetch the file again."


def read_idx(path: Path, kind: Kind) -> NDArray[np.uint8]:
    """The values of an IDX file, plain or gzip (told by its content): uint8 (N,) for labels, (N, H, W) for images.

    The array is read-only. Raises HvdDDPError for a file that can't be read, is not such an IDX file, or whose length
    is not exactly what its header says; memory is only taken for what the file can really hold.
    """
    try:
        with open_regular(path) as file:
            capacity = os.fstat(file.fileno()).st_size
            compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if not compressed:
                return _read(file, path, kind, capacity)
            with gzip.GzipFile(fileobj=file) as stream:
                return _read(stream, path, kind, capacity * _DEFLATE_RATIO)
    except (OSError, EOFError, zlib.error) as error:
        raise HvdDDPError(f"Data file `{path}` can't be read: `{error}`. It may be damaged. {_AGAIN}") from error


def _read(stream: io.BufferedIOBase, path: Path, kind: Kind, capacity: int) -> NDArray[np.uint8]:
    shape = _read_shape(stream, path, kind)
    size = math.prod(shape)
    if size > min(capacity, _MAX_VALUES):
        raise HvdDDPError(
            f"Data file `{path}` announces {kind} of the sizes `{shape}`, more than a file of its length holds "
            f"(or than the limit of {_MAX_VALUES} bytes): it is cut short or damaged. {_AGAIN}"
        )
    # One byte more than wanted shows trailing bytes, and takes gzip to its end, where it verifies the checksum.
    values = stream.read(size + 1)
    if len(values) < size:
        raise HvdDDPError(
            f"Data file `{path}` holds `{len(values)}` of the `{size}` values that its header announces: "
            f"it is cut short. {_AGAIN}"
        )
    if len(values) > size:
        raise HvdDDPError(
            f"Data file `{path}` goes on after the `{size}` values that its header announces: it is damaged. {_AGAIN}"
        )
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)


def _read_shape(stream: io.BufferedIOBase, path: Path, kind: Kind) -> tuple[int, ...]:
    """Checks the magic number; returns the sizes, each at least 1."""
    magic = stream.read(4)
    wanted = _NUM_DIMENSIONS[kind]
    if len(magic) < 4 or magic[:3] != b"\x00\x00\x08":
        raise HvdDDPError(
            f"Data file `{path}` begins with the bytes `{magic.hex()}`, an IDX file of {kind} with "
            f"`000008{wanted:02x}`: it is another kind of file, or damaged. {_AGAIN}"
        )
    if magic[3] != wanted:
        names = {number: name for name, number in _NUM_DIMENSIONS.items()}
        found = names.get(magic[3], "something else")
        raise HvdDDPError(
            f"Data file `{path}` holds {found} (`{magic[3]}` dimensions) where {kind} (`{wanted}`) belong: "
            f"files were swapped or renamed. Give each its own name back, or fetch them again."
        )
    sizes = stream.read(4 * wanted)
    if len(sizes) < 4 * wanted:
        raise HvdDDPError(f"Data file `{path}` ends within its header: it is cut short. {_AGAIN}")
    shape = struct.unpack(f">{wanted}I", sizes)
    if 0 in shape:
        raise HvdDDPError(f"Data file `{path}` announces the sizes `{shape}`: there are no {kind} in it. {_AGAIN}")
    return shape
