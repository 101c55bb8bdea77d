"""A snapshot is the state of its moment, and holds nothing that a checkpoint could not give back."""

import collections
import enum
import io
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hvd_ddp.errors import HvdDDPError
from hvd_ddp.snapshot import Snapshot, refuse_foreign

Pair = collections.namedtuple("Pair", "a b")


class Level(enum.IntEnum):
    LOW = 1


class Schedule:
    pass


class Keeps(nn.Linear):
    """A model with something of its own in its state."""

    def __init__(self, kept: Any) -> None:
        super().__init__(2, 2)
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_what_training_changes_later_is_not_in_it() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    before = {name: value.clone() for name, value in state["model"].items()}
    taken = Snapshot().take(state)
    optimizer.step()
    assert all(torch.equal(taken["model"][name], before[name]) for name in before)
    assert not any(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert taken["optimizer"]["state"][0]["step"] == 1
    assert taken["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert taken["optimizer"]["param_groups"][0] is not state["optimizer"]["param_groups"][0]
    assert taken.keys() == state.keys()


def test_the_next_takes_the_memory_of_the_last() -> None:
    snapshot, tensor = Snapshot(), torch.arange(6.0).view(2, 3)
    places = []
    for _ in range(2):
        tensor += 1
        taken = snapshot.take({"w": tensor, "more": [tensor[0].clone()]})
        assert torch.equal(taken["w"], tensor)
        places.append((taken["w"].data_ptr(), taken["more"][0].data_ptr()))
    assert places[0] == places[1]
    assert places[0][0] != tensor.data_ptr()
    for changed in (torch.ones(4), torch.ones(2, 3, dtype=torch.float64)):
        assert torch.equal(snapshot.take({"w": changed})["w"], changed)


def test_tied_weights_stay_one() -> None:
    layer = nn.Linear(300, 300, bias=False)
    state = nn.ModuleDict({"one": layer, "other": layer}).state_dict()
    taken = Snapshot().take(state)
    assert taken["one.weight"].data_ptr() == taken["other.weight"].data_ptr()
    assert type(taken) is collections.OrderedDict


FOREIGN = {
    "numpy's scalar": np.float64(0.5),
    "an array": np.zeros(3),
    "a path": pathlib.Path("x"),
    "an object": Schedule(),
    "a named tuple": Pair(1, 2),
    "an enum": Level.LOW,
    "a default dict": collections.defaultdict(int),
    "a function": len,
    "what can't be pickled": lambda: 1,
    "numpy's random state": np.random.get_state(),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_could_not_be_loaded_is_refused_by_its_key(what: str) -> None:
    for value, key in ((FOREIGN[what], "_extra_state"), ({"a": [1, FOREIGN[what]]}, "_extra_state.a.1")):
        state = {"model": Keeps(value).state_dict(), "step": 1}
        with pytest.raises(HvdDDPError, match=rf"^`model\.{key}(\.\d)?` in the state of this run is a `"):
            refuse_foreign(state)
        with pytest.raises(HvdDDPError):
            Snapshot().take(state)


def test_keys_are_looked_at_too() -> None:
    with pytest.raises(HvdDDPError, match="`a` in the state"):
        refuse_foreign({"a": {pathlib.Path("x"): 1}})


def test_what_can_be_loaded_is_kept() -> None:
    state = {
        "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"), "complex": 1 + 2j,
        "bytes": b"abc", "set": {1, 2}, "counter": collections.Counter("aab"), "tuple": (1, (2.5, None), True),
        "parameter": nn.Parameter(torch.ones(2)), "half": torch.ones(2, dtype=torch.float16), "large": 2**100,
        "empty": torch.empty(0, 3), "strided": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1), 7: "number",
        "sparse": torch.eye(3).to_sparse(),
    }  # fmt: skip
    refuse_foreign(state)
    taken = Snapshot().take(state)
    loaded = through_a_file(taken)
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert loaded[name].dtype == value.dtype
            assert value.is_sparse or loaded[name].stride() == value.stride()
            assert torch.equal(loaded[name].to_dense(), value.detach().to_dense()), name
        else:
            assert loaded[name] == value
    assert not loaded["parameter"].requires_grad


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
OTHERS = st.sampled_from([np.int64(1), Level.LOW, Pair(1, 2), b"x", 1j, torch.Size([1]), Schedule(), torch.float32])
STATES = st.recursive(
    PLAIN | OTHERS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(STATES)
def test_refused_if_and_only_if_it_can_not_be_loaded(value: Any) -> None:
    try:
        loaded, loads = through_a_file({"x": value}), True
    except Exception:
        loads = False
    try:
        taken, accepted = Snapshot().take({"x": value}), True
    except HvdDDPError:
        accepted = False
    assert accepted == loads
    if loads:
        assert taken == loaded == {"x": value}
