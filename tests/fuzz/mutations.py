"""Strategies: values of any other type, and valid artefacts with a few changes."""

import copy
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

DEEP = 100_000  # brackets, more than any parser's stack
NAMES = ["../x", "/tmp/hvd_ddp_fuzz_outside", "..", ".", "", "a\0b", "x" * 300, "a/b", "\udcff", "\x1b[31m", "a\nb",
         "~", "$HOME", "-rf", "CON", "%s", "{0}", "٣"]  # fmt: skip
NUMBERS = [0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 1e308, -1e308, 5e-324, 0.5, math.nan, math.inf,
           -math.inf, True]  # fmt: skip

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.integers(),
    st.floats(),
    st.sampled_from(NAMES),
    st.text(max_size=20),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.text(max_size=5), st.just("step")), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def changed(draw: st.DrawFn, valid: Any, other: st.SearchStrategy[Any] = values) -> Any:
    """A nest of dicts and lists in which up to three places are replaced, removed or added; at times none."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(0, 3))):
        places = list(_places(value))
        if not places:
            return draw(other)
        holder, key = draw(st.sampled_from(places))
        what = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "wrap"]))
        if holder is None:
            if draw(st.integers(0, 9)) == 0:
                return draw(other)
        elif what == "replace":
            holder[key] = copy.deepcopy(draw(other))
        elif what == "remove":
            del holder[key]
        elif what == "wrap":
            holder[key] = [holder[key]]
        elif isinstance(holder, dict):
            holder[draw(st.one_of(st.text(max_size=8), st.sampled_from(NAMES)))] = copy.deepcopy(draw(other))
        else:
            holder.append(copy.deepcopy(draw(other)))
    return value


def _places(value: Any, holder: Any = None, key: Any = None) -> Any:
    """Every (holder, key) inside, the outermost with None."""
    yield holder, key
    if isinstance(value, dict | list):
        for inner, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(item, value, inner)


@st.composite
def spoilt(draw: st.DrawFn, valid: bytes) -> bytes:
    """Bytes with up to four changes: flipped, cut, cut out, doubled, put in; at times none."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.sampled_from([1, 2, 4, 8, 64, 1024]))
        what = draw(st.sampled_from(["flip", "set", "cut", "remove", "double", "insert"]))
        if what == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "set":
            data[at : at + length] = draw(st.sampled_from([b"\0", b"\xff"])) * length
        elif what == "cut":
            del data[at:]
        elif what == "remove":
            del data[at : at + length]
        elif what == "double":
            data[at:at] = data[at : at + length]
        else:
            data[at:at] = draw(st.binary(max_size=16))
    return bytes(data)


def as_json(value: Any) -> bytes:
    """With what JSON has no word for as Python writes it."""
    return json.dumps(value).encode()


def json_files(valid: Any) -> st.SearchStrategy[bytes]:
    """A file of JSON: with other values, with other bytes, none at all, or one that breaks parsers."""
    good = as_json(valid)
    return st.one_of(
        changed(valid).map(as_json),
        changed(valid).map(as_json),
        spoilt(good),
        st.sampled_from([b"", b"null", b"[]", b"\xff\xfe", b"[" * DEEP, b'{"a":' * DEEP, b"9" * 5000, b'"\\ud800"',
                         b"-", good + good, b" " * 1_100_000]),
    )  # fmt: skip


def _fifo(path: Path, folder: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path, folder: Path) -> None:
    path.mkdir()


def _linked(path: Path, folder: Path) -> None:
    path.symlink_to(folder / "outside")


def _endless(path: Path, folder: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path, folder: Path) -> None:
    path.symlink_to(path)


def _dangling(path: Path, folder: Path) -> None:
    path.symlink_to(folder / "not there")


# Makes something at `path` that is no file of one's own; `folder` is above all.
Strange = Callable[[Path, Path], None]
strange = st.sampled_from([_fifo, _folder, _linked, _endless, _loop, _dangling])


def put(path: Path, what: bytes | Strange | None, folder: Path) -> None:
    """Leave it at `path`; None: nothing."""
    if isinstance(what, bytes):
        path.write_bytes(what)
    elif what is not None:
        what(path, folder)
