"""Checkpoints and files of weights that an attacker wrote: with a hash that fits, and any content."""

import copy
import functools
import hashlib
import io
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from fuzz.guard import fuzz
from fuzz.mutations import changed, put, spoilt, strange, values
from fuzz.test_run_directory import backend
from hvd_ddp import assemble, checkpoint
from hvd_ddp.commands import trained
from hvd_ddp.config import TrainConfig
from hvd_ddp.data.arrays import ArrayDataset, Data
from hvd_ddp.optim import build
from hvd_ddp.trainer import Trainer

CONFIG: dict[str, Any] = {"max_steps": 3, "global_batch": 4, "ema": 0.9, "early_stop": 9, "check_replicas": 0,
                          "eval_every": 10, "save_every": 100, "on_nan": "skip"}  # fmt: skip


@functools.cache
def data() -> Data:
    random = np.random.default_rng(0)
    parts = [
        ArrayDataset(random.integers(0, 256, (n, 1, 2, 2), dtype=np.uint8), np.arange(n, dtype=np.int64) % 2)
        for n in (8, 4)
    ]
    return Data.measure("tiny", *parts, num_classes=2)


def trainer(directory: Path, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    config = TrainConfig(**{**CONFIG, "run_dir": directory, **options})
    return Trainer(config, model, build(config, model), data(), backend())


@functools.cache
def valid() -> dict[str, Any]:
    """The state after a step."""
    one = trainer(Path("nowhere"))
    for step in one.feed.steps(one.place, 1):
        one.train_step(step.micros, step.window)
        one.place = step.place
    return copy.deepcopy(one.state_dict())


def tensors() -> st.SearchStrategy[torch.Tensor]:
    """Of other shapes and types, and some that are far larger than the file."""
    return st.sampled_from([
        torch.zeros(3), torch.zeros(3, 4), torch.zeros(0), torch.tensor(1), torch.zeros(1).expand(10**12),
        torch.zeros(1).expand(3, 4), torch.zeros(3, 4, dtype=torch.complex64), torch.zeros(3, 4, dtype=torch.int64),
        torch.zeros(3, 4, dtype=torch.bool), torch.zeros(2, 2).to_sparse(), torch.empty(3, 4, device="meta"),
        torch.full((3, 4), torch.nan), torch.full((3,), torch.inf), nn.Parameter(torch.zeros(3)),
        torch.zeros(12)[::2], torch.zeros(3, 4).T, torch.zeros(3, 4, dtype=torch.float16),
        torch.quantize_per_tensor(torch.zeros(3, 4), 0.1, 0, torch.qint8),
    ])  # fmt: skip


anything = st.one_of(values, tensors(), st.sampled_from([{}, (), {1: 2}, {(): 3}, b"x", {0: {}}, "x" * 10_000]))


def as_file(value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except (RuntimeError, UnicodeEncodeError, NotImplementedError):
        return b""
    return buffer.getvalue()


def pickled(operations: bytes) -> bytes:
    """A file of torch with that as its pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", operations)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/data/0", b"\0" * 64)
        file.writestr("archive/version", "3\n")
    return buffer.getvalue()


def deflated(size: int) -> bytes:
    """A file of torch whose storage, of zeros, is a thousand times larger than it."""
    small, large = io.BytesIO(as_file({"w": torch.zeros(64)})), io.BytesIO()
    with zipfile.ZipFile(small) as source, zipfile.ZipFile(large, "w", zipfile.ZIP_DEFLATED) as file:
        for name in source.namelist():
            number = b"J" + (size // 4).to_bytes(4, "little")
            content = source.read(name).replace(b"K@", number) if name.endswith("data.pkl") else source.read(name)
            file.writestr(name, bytes(size) if name.endswith("data/0") else content)
    return large.getvalue()


def reduced(function: bytes, *arguments: bytes) -> bytes:
    """The pickle of a call."""
    return pickled(b"\x80\x02c" + function + b"\n(" + b"".join(arguments) + b"tR.")


NUMBER = b"\x8a\x05\x00\xe4\x0b\x54\x02"  # 10**10
LEGACY = io.BytesIO()
torch.save({"w": torch.zeros(3)}, LEGACY, _use_new_zipfile_serialization=False)
SEEDS = [
    b"", b"PK", b"PK\x05\x06" + b"\0" * 18, deflated(1 << 30), LEGACY.getvalue(), LEGACY.getvalue()[:-5],
    reduced(b"os\nsystem", b"X\x02\0\0\0id"), reduced(b"builtins\nbytearray", NUMBER),
    reduced(b"__builtin__\nbytearray", NUMBER), reduced(b"builtins\nset", b"(lK\x01a"),
    reduced(b"torch\nTensor", NUMBER), reduced(b"torch\nSize", b"(NNt"), reduced(b"builtins\neval", b"X\x01\0\0\x001"),
    reduced(b"torch._utils\n_rebuild_tensor_v2", b"NNNN"), pickled(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."),
    pickled(b"\x80\x02}q\0X\x01\0\0\0ah\0s."), pickled(b"\x80\x02]q\0(h\0h\0h\0h\0e."), pickled(b"."), pickled(b""),
    pickled(b"\x80\x02}(X\x05\0\0\0modelccollections\nOrderedDict\n)R}X\x09\0\0\0_metadataK\x05sbu."),
    pickled(b"\x80\x02" + b"".join(b"]q%c(" % (n + 1) + b"h%c" % n * 9 + b"e" for n in range(1, 30)) + b"."),
    pickled(b"\x80\x02]q\0" + b"".join(b"](" + b"h%c" % n * 9 + b"eq%c" % (n + 1) for n in range(60)) + b"."),
]  # fmt: skip


def store(folder: Path, content: bytes, step: int = 1) -> Path:
    """With a hash that fits."""
    path = checkpoint.of_step(folder / "checkpoints", step)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.with_name(path.name + ".sha256").write_text(f"{hashlib.sha256(content).hexdigest()}  {path.name}\n")
    return path


def go_on(directory: Path) -> None:
    """Two more steps from what is there."""
    try:
        one = trainer(directory)
        results = one.fit()
        assert results["status"] == "finished"
        assert one.step == one.total_steps
    finally:
        backend().meeting.farewells.clear()


def look(path: Path) -> None:
    """What `evaluate` and --init do with a file."""
    options: Any = SimpleNamespace(
        data=None, data_dir=None, model=None, task=None, precision=None, checkpoint=path, best=False
    )
    state = checkpoint.parse(assemble.read_weights(path), str(path))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    assemble.fit_weights(model, state, str(path))
    model(torch.zeros(2, 1, 2, 2))
    trained._config(options, state, str(path))


@fuzz(60, SEEDS, content=st.deferred(lambda: spoilt(as_file({"model": {"w": torch.ones(3)}, "step": 1}))))
def test_bytes(folder: Path, content: bytes) -> None:
    look(store(folder / "inside", content))


@fuzz(60, state=st.deferred(lambda: changed(valid(), anything)))
def test_states_to_go_on_from(folder: Path, state: Any) -> None:
    store(folder / "inside" / "run", as_file(state))
    go_on(folder / "inside" / "run")


FIELDS = ["optimizer", "decisions", "progress", "place", "ema", "model", "config", "data", "scaler", "total_steps"]


@fuzz(100, field=st.sampled_from(FIELDS), chance=st.data())
def test_fields_of_a_state(folder: Path, field: str, chance: Any) -> None:
    state = {**valid(), field: chance.draw(changed(valid()[field], anything))}
    store(folder / "inside" / "run", as_file(state))
    go_on(folder / "inside" / "run")


@fuzz(40, state=st.deferred(lambda: st.one_of(changed(valid(), anything), changed(valid()["model"], anything))))
def test_weights_alone(folder: Path, state: Any) -> None:
    look(store(folder / "inside", as_file(state)))


@fuzz(40, best=values)
def test_the_best_one(folder: Path, best: Any) -> None:
    directory = folder / "inside"
    store(directory, as_file({**valid(), "decisions": {"best": best, "stale": 0, "waited": 0, "drops": 0}}))
    options: Any = SimpleNamespace(checkpoint=directory, best=True)
    trained.read(options)


@fuzz(20, what=strange, of_hash=st.booleans())
def test_what_is_no_file(folder: Path, what: Any, of_hash: bool) -> None:
    directory = folder / "inside" / "run"
    path = store(directory, as_file(valid()))
    target = path.with_name(path.name + ".sha256") if of_hash else path
    target.unlink()
    put(target, what, folder)
    go_on(directory)
