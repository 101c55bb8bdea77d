"""--backend local over several GPUs of one process: chosen where it was asked for, and invisible in what is saved."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launchers import Result
from rundir import different, distance, newest, tensors
from torch import nn, optim

from hvd_ddp.backends import connect
from hvd_ddp.backends.base import Backend
from hvd_ddp.backends.local import LocalBackend
from hvd_ddp.errors import HvdDDPError

Cli = Callable[..., Result]
TRAINING = ["--threads", "1", "--max-steps", "5", "--global-batch", "64", "--optimizer", "sgd", "--accumulate", "2"]


def backend_on(device: str, *, asked_for: bool, monkeypatch: pytest.MonkeyPatch, gpus: int) -> Backend:
    """The local backend, set up where torch sees so many GPUs."""
    with connect("local" if asked_for else "auto", device="cpu") as first:
        backend = LocalBackend(first.meeting, transport="none", device=torch.device(device), timeout=1.0)
        backend.why, backend.asked_for = first.why, first.asked_for
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    backend.setup()
    return backend


@pytest.mark.parametrize(
    ("device", "asked_for", "gpus", "wrapped"),
    [("cuda", True, 4, True), ("cuda", True, 1, False), ("cuda", False, 4, False), ("cpu", True, 4, False)],
)
def test_when_it_is_chosen(
    device: str, asked_for: bool, gpus: int, wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a count of GPUs that is made up: there are none here."""
    backend = backend_on(device, asked_for=asked_for, monkeypatch=monkeypatch, gpus=gpus)
    model = nn.Linear(3, 2)
    result, _ = backend.prepare(model, optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(result, nn.DataParallel) == wrapped
    assert (result.module if wrapped else result) is model
    assert ("DataParallel over 4 GPUs. Prefer DDP (--nproc 4)" in backend.why) == wrapped
    backend.setup()  # again, as a backend may be
    assert backend.why.count("DataParallel") == wrapped


def test_unused_parameters_can_not_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_on("cuda", asked_for=True, monkeypatch=monkeypatch, gpus=2)
    model = nn.Linear(3, 2)
    with pytest.raises(HvdDDPError, match="--find-unused-parameters: DataParallel"):
        backend.prepare(model, optim.SGD(model.parameters(), lr=0.1), find_unused_parameters=True)


def test_what_is_saved_has_no_prefix(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a training with the wrapper, which hands on to the model where there is no GPU."""
    assert cli(*TRAINING, "--device", "cpu", "--backend", "local", "--run-dir", "bare").code == 0
    monkeypatch.setattr(LocalBackend, "_gpus", 2)
    forwards: list[int] = []
    monkeypatch.setattr(nn.DataParallel, "forward", lambda self, x: forwards.append(len(x)) or self.module(x))
    result = cli(*TRAINING, "--device", "cpu", "--backend", "local", "--run-dir", "wrapped")
    assert result.code == 0, result.text
    assert forwards == [32] * 10
    assert different(tensors(newest(Path("wrapped"))), tensors(newest(Path("bare")))) == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_compute_what_one_does(cli: Cli) -> None:
    assert cli(*TRAINING, "--run-dir", "one").code == 0
    result = cli(*TRAINING, "--backend", "local", "--run-dir", "two")
    assert result.code == 0 and "DataParallel over" in result.out
    assert distance(tensors(newest(Path("two"))), tensors(newest(Path("one")))) < 1e-5
