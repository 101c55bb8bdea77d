"""Buckets of gradients, against the gradients of a model that has none. Three ranks that have the same data add up."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hvd_ddp import Communication
from hvd_ddp.backends.buckets import Buckets
from hvd_ddp.backends.horovod import HorovodBackend
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.launch import Launch

RANKS = 3


class Sums:
    """Adds up the tensors of ranks that all have the same, once somebody waits for it."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Tensor]] = []

    def start(self, tensor: Tensor, name: str) -> Tensor:
        self.sent.append((name, tensor.clone()))
        return tensor

    def finish(self, tensor: Tensor) -> None:
        tensor.mul_(RANKS)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 4, 7), nn.Linear(7, 3)]
    return nn.Sequential(*layers)


def backward(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    kind = next(model.parameters()).dtype
    inputs = torch.randn(6, 3, 8, 8, generator=generator).to(kind)
    functional.cross_entropy(model(inputs), torch.arange(6) % 3).backward()


def gradients(model: nn.Module) -> Iterator[Tensor]:
    return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def put_in(model: nn.Module, sums: Sums, **more: Any) -> Buckets:
    return Buckets(model, sums.start, sums.finish, **{"name": "g", "scale": 1 / RANKS, **more})


@pytest.mark.parametrize("mebibytes", [0.0, 0.001, 25.0])
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_the_gradients_of_one_process(mebibytes: float, form: torch.memory_format) -> None:
    plain, ours = (network().double().to(memory_format=form) for _ in range(2))
    sums = Sums()
    buckets = put_in(ours, sums, mebibytes=mebibytes)
    for step in range(3):
        for model in (plain, ours):
            backward(model, step)
        assert buckets.begun
        buckets.finish()
        assert not buckets.begun
        for wanted, found, parameter in zip(gradients(plain), gradients(ours), ours.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)
            assert found.stride() == parameter.stride()
        for model in (plain, ours):
            model.zero_grad(set_to_none=step != 1)  # both ways
    names = [name for name, _ in sums.sent]
    num = {0.0: 8, 0.001: 6, 25.0: 1}[mebibytes]
    assert sorted(names) == sorted([f"g.{number}" for number in range(num)] * 3)
    assert names[0] in ("g.0", "g.1"), "the last layer is first"


def test_earlier_micro_batches_are_not_sent() -> None:
    plain, ours, sums = network(), network(), Sums()
    buckets = put_in(ours, sums)
    for seed in range(3):
        backward(plain, seed)
        buckets.paused = seed < 2
        backward(ours, seed)
        assert len(sums.sent) == (seed == 2)
    buckets.finish()
    for wanted, found in zip(gradients(plain), gradients(ours), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_parameter_without_a_gradient_counts_as_zero() -> None:
    """What was used in an earlier micro-batch alone goes along as well."""
    ours, sums = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]), Sums()
    buckets = put_in(ours, sums)
    buckets.paused = True
    ours[1](torch.ones(1, 3)).sum().backward()
    buckets.paused = False
    ours[0](torch.ones(1, 3)).sum().backward()
    assert not sums.sent
    buckets.finish()
    assert [module.weight.grad.tolist() for module in ours] == [[[1.0] * 3] * 3, [[1.0] * 3] * 3, [[0.0] * 3] * 3]
    assert len(sums.sent) == 1


def test_nothing_at_all_is_sent_as_zeros() -> None:
    ours, sums = network(), Sums()
    buckets = put_in(ours, sums)
    buckets.finish()
    assert not any(gradient.any() for gradient in gradients(ours)) and len(sums.sent) == 1


@pytest.mark.parametrize("used", [True, False])
def test_halves(used: bool) -> None:
    plain, ours, sums = network(), network(), Sums()
    buckets = put_in(ours, sums, dtype=torch.float16)
    backward(plain)
    if used:
        backward(ours)
    buckets.finish()
    for wanted, found in zip(gradients(plain), gradients(ours), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted * used, rtol=2e-3, atol=1e-6)
    assert {tensor.dtype for _, tensor in sums.sent} == {torch.float16}


def test_dtypes_have_buckets_of_their_own() -> None:
    ours, sums = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2).double(), nn.Linear(3, 2)]), Sums()
    ours[0].bias.requires_grad_(False)
    buckets = put_in(ours, sums)
    for module in ours:
        module(torch.ones(1, 3, dtype=module.weight.dtype)).sum().backward()
    buckets.finish()
    assert [(name, tensor.dtype) for name, tensor in sorted(sums.sent)] == [
        ("g.0", torch.float32),
        ("g.1", torch.float64),
    ]
    assert ours[0].bias.grad is None and ours[1].weight.grad.dtype == torch.float64


def test_sparse_gradients_become_dense() -> None:
    ours, sums = nn.Embedding(5, 2, sparse=True), Sums()
    buckets = put_in(ours, sums)
    ours(torch.tensor([1, 2, 2])).sum().backward()
    buckets.finish()
    assert ours.weight.grad.tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]


def test_parameters_with_gaps_and_without_dimensions() -> None:
    ours, sums = nn.ParameterList([torch.ones(4, 6)[:, ::2], torch.tensor(2.0)]), Sums()
    buckets = put_in(ours, sums)
    (ours[0].sum() * ours[1]).backward()
    buckets.finish()
    assert ours[0].grad.tolist() == [[2.0] * 3] * 4 and ours[1].grad.item() == pytest.approx(12.0)


def test_a_second_backward_is_refused() -> None:
    ours, sums = network(), Sums()
    put_in(ours, sums)
    backward(ours)
    with pytest.raises(HvdDDPError, match=r"second backward .* all backwards of a step but the last in `backend\.no_s"):
        backward(ours)


def test_names_and_places() -> None:
    """Gradients begin at 64 bytes of each other, as memory that is a tensor's own does."""
    ours, sums = network(), Sums()
    buckets = put_in(ours, sums, name="mine")
    backward(ours)
    buckets.finish()
    first = min(gradient.data_ptr() for gradient in gradients(ours))
    assert all((gradient.data_ptr() - first) % 64 == 0 for gradient in gradients(ours))
    assert sums.sent[0][0] == "mine.0"


def test_a_step_outside_of_synchronize_waits_for_them() -> None:
    """Else it would go by gradients that are still on their way."""
    backend = HorovodBackend.__new__(HorovodBackend)
    backend.launch, backend.communication = Launch("mpirun", world_size=RANKS), Communication()
    sums = Sums()
    backend._hvd = SimpleNamespace(
        broadcast_parameters=lambda *_, **__: None,
        allreduce_async_=lambda tensor, op, name: sums.start(tensor, name),
        synchronize=sums.finish,
        Sum="sum",
    )
    plain, ours = network().double(), network().double()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, ours)]
    wrapped, mine = backend.prepare(ours, optimizers[1])
    assert wrapped is ours and mine is optimizers[1]
    for _ in range(2):
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    for wanted, found in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)
