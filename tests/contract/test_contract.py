"""The backends keep their contract and compute the same, against references that know nothing of them."""

import functools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from launchers import command, run

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from cases import CASES, MODELS, ONE_PROCESS, STEPS, arrays  # noqa: E402
from reference import one_process, same_shares  # noqa: E402

# name: (launcher, ranks, backend, transport)
CELLS = {
    "ddp-gloo-2": ("torchrun", 2, "ddp", "gloo"),
    "ddp-mpi-2": ("mpirun", 2, "ddp", "mpi"),
    "horovod-mpi-2": ("mpirun", 2, "horovod", "mpi"),
    "horovod-gloo-2": ("torchrun", 2, "horovod", "gloo"),
    "ddp-gloo-3": ("torchrun", 3, "ddp", "gloo"),
    "ddp-mpi-3": ("mpirun", 3, "ddp", "mpi"),
    "horovod-gloo-3": ("torchrun", 3, "horovod", "gloo"),
    "ddp-gloo-4": ("mpirun", 4, "ddp", "gloo"),
    "ddp-mpi-4": ("mpirun", 4, "ddp", "mpi"),
    "horovod-mpi-4": ("mpirun", 4, "horovod", "mpi"),
    "local-1": ("python", 1, "local", "auto"),
}
TWO = [cell for cell, (_, ranks, _, _) in CELLS.items() if ranks == 2]
# Three ranks: shares that are unequal, which four have as well.
ALL = [pytest.param(cell, marks=[pytest.mark.full] if cell.endswith("-3") else []) for cell in CELLS]


@functools.cache
def outcome(cell: str, base: Path) -> list[dict]:
    """Run the cell once; what each rank found."""
    launcher, num_ranks, backend, transport = CELLS[cell]
    out = base / cell
    if out.exists():
        pytest.fail("this cell has failed already")
    out.mkdir()
    cases = list(CASES) if num_ranks == 2 else ONE_PROCESS
    program = [str(HERE / "worker.py"), str(out), "--backend", backend, "--transport", transport, "--cases", *cases]
    result = run(command(launcher, num_ranks, program), timeout=200)
    assert result.code == 0, result.text[-6000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contract")


def last_state(base: Path, cell: str, case: str) -> dict:
    outcome(cell, base)
    return torch.load(base / cell / case / "checkpoints" / f"step_{STEPS:08d}.pt", weights_only=True)


def tensors(value: object, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a nested state, by path; numbers as tensors."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, dict):
        return {k: t for key, part in value.items() for k, t in tensors(part, f"{name}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: t for key, part in enumerate(value) for k, t in tensors(part, f"{name}[{key}]").items()}
    return {name: torch.tensor(value)} if isinstance(value, int | float) else {}


def assert_same_bits(state: dict, other: dict) -> None:
    for part in ("model", "optimizer", "scaler", "progress"):
        left, right = tensors(state[part], part), tensors(other[part], part)
        assert left.keys() == right.keys()
        different = [name for name in left if not torch.equal(left[name], right[name])]
        assert not different, different


def assert_close(model: dict, wanted: dict, tolerance: float) -> None:
    assert model.keys() == wanted.keys()
    for name in wanted:
        distance = (model[name].double() - wanted[name].double()).norm() / wanted[name].double().norm().clamp_min(1e-30)
        assert distance <= tolerance, (name, float(distance))


def normalised(num_samples: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    images, targets = arrays(num_samples)
    pixels = torch.from_numpy(images)
    mean = pixels.double().mean()
    std = pixels.double().std(correction=0)
    mean, std = mean.to(dtype), std.to(dtype)
    return (pixels.to(dtype) - mean) / std, torch.from_numpy(targets)


def steps_of(num_samples: int) -> list[list[int]]:
    """Which samples each step uses: of the product's order, as data (tests/data proves it to be a permutation)."""
    from hvd_ddp.data.sampler import permutation

    steps: list[list[int]] = []
    for epoch in range(STEPS):
        order = list(permutation(num_samples, 0, epoch))
        steps += [[int(i) for i in order[start : start + 16]] for start in range(0, num_samples, 16)]
    return steps[:STEPS]


def cut(samples: list[int], parts: int) -> list[list[int]]:
    """Contiguous parts in order; the first ones have one more where it does not divide."""
    small, more = divmod(len(samples), parts)
    sizes = [small + (part < more) for part in range(parts)]
    return [samples[sum(sizes[:part]) : sum(sizes[: part + 1])] for part in range(parts)]


def first_model(base: Path, cell: str, case: str) -> torch.nn.Module:
    outcome(cell, base)
    model_name, _, options = CASES[case]
    model = MODELS[model_name]()
    if options.get("precision") == "fp64":
        model.double()
    model.load_state_dict(torch.load(base / cell / f"{case}.first.pt", weights_only=True))
    return model


@pytest.mark.parametrize("cell", ALL)
@pytest.mark.parametrize("when", ["interface", "interface_again"])
def test_interface(cell: str, when: str, base: Path) -> None:
    results = [rank[when] for rank in outcome(cell, base)]
    n = len(results)
    for rank, seen in enumerate(results):
        ranks = range(n)
        assert seen["sums"]["sum"] == [sum(2**53 + 1 + r for r in ranks), sum(ranks), -sum(ranks)]
        assert seen["sums"]["max"] == [2**53 + n, n - 1, 0]
        assert seen["sums"]["min"] == [2**53 + 1, 0, 1 - n]
        assert seen["untouched"]
        assert seen["scalar"] == [sum(ranks), []]
        assert seen["gathered"] == [[{"a": [1, None]}, "text" * 3000, 7, [True, 1.5]][r % 4] for r in ranks]
        assert seen["last"] == {"from": n - 1}
        assert seen["blob"] == [256 * 1001 + 1, True, True]
        assert seen["is_main"] == (rank == 0)
        assert seen["together"] == ("this rank can't (Rank 1 says so.)" if n > 1 else "nothing raised")
        _, _, backend, transport = CELLS[cell]
        assert seen["name"] == backend
        assert transport in ("auto", seen["transport"])
    assert min(seen["left"] for seen in results) >= max(seen["came"] for seen in results)  # the barrier waits


@pytest.mark.parametrize("cell", ALL)
def test_teardown_leaves_no_threads_of_the_backend(cell: str, base: Path) -> None:
    """A group that lives until the interpreter ends makes it end with 134 now and then."""
    for rank in outcome(cell, base):
        assert not [name for name in rank["threads"] if "gloo" in name or "hvd" in name.lower()], rank["threads"]
        assert "pt_tcpstore_uv" in rank["threads"] or not rank["interface"]["is_main"] or cell == "local-1"


@pytest.mark.parametrize("cell", TWO[1:])
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_give_the_same_bits(cell: str, case: str, base: Path) -> None:
    assert_same_bits(last_state(base, cell, case), last_state(base, TWO[0], case))


@pytest.mark.parametrize("cell", TWO)
def test_a_run_in_parts_under_a_moving_rate_gives_the_same_bits(cell: str, base: Path) -> None:
    straight = last_state(base, cell, "straight/adamw_clip_accumulate")
    assert_same_bits(last_state(base, cell, "stops/adamw_clip_accumulate"), straight)
    rates = [group["lr"] for group in straight["optimizer"]["param_groups"]]
    assert rates == [pytest.approx(0.01 * 0.7 ** (29 // 4))]


@pytest.mark.parametrize("cell", ALL)
@pytest.mark.parametrize("case", ONE_PROCESS)
def test_against_one_process(cell: str, case: str, base: Path) -> None:
    _, num_samples, options = CASES[case]
    double = options.get("precision") == "fp64"
    inputs, targets = normalised(num_samples, torch.float64 if double else torch.float32)
    wanted = one_process(first_model(base, cell, case), inputs, targets, steps_of(num_samples), options)
    assert_close(last_state(base, cell, case)["model"], wanted.state_dict(), 1e-12 if double else 1e-5)


@pytest.mark.parametrize("case", ["sgd_momentum_decay", "one_sample_left", "sgd_accumulate_clip", "unused"])
def test_two_ranks_against_one_process_in_fp32(case: str, base: Path) -> None:
    _, num_samples, options = CASES[case]
    inputs, targets = normalised(num_samples, torch.float32)
    wanted = one_process(first_model(base, TWO[0], case), inputs, targets, steps_of(num_samples), options)
    assert_close(last_state(base, TWO[0], case)["model"], wanted.state_dict(), 1e-5)


@pytest.mark.parametrize("case", ["batch_norm", "batch_norm_accumulate", "bf16"])
def test_two_ranks_against_the_same_shares(case: str, base: Path) -> None:
    """BatchNorm and bf16 depend on the shares. Buffers as at evaluation: averaged over ranks."""
    _, num_samples, options = CASES[case]
    inputs, targets = normalised(num_samples, torch.float32)
    shares = [[cut(share, options.get("accumulate", 1)) for share in cut(step, 2)] for step in steps_of(num_samples)]
    model = first_model(base, TWO[0], case)
    wanted = same_shares(model, inputs, targets, shares, options, steps_per_epoch=4)
    assert_close(last_state(base, TWO[0], case)["model"], wanted.state_dict(), 1e-6)
    figures = outcome(TWO[0], base)[0][case]
    wanted.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=case == "bf16"):
        outputs = wanted(inputs[:13])
        right = (outputs.argmax(1) == targets[:13]).double().mean().item()
        loss = torch.nn.functional.cross_entropy(outputs.float(), targets[:13]).item()
    assert figures["accuracy"] == pytest.approx(right, abs=1e-9)
    assert figures["loss"] == pytest.approx(loss, rel=1e-2 if case == "bf16" else 1e-5)


@pytest.mark.parametrize("cell", TWO)
def test_buffers_are_the_same_on_all_ranks_after_evaluation(cell: str, base: Path) -> None:
    first, second = outcome(cell, base)
    for case in ("batch_norm", "batch_norm_accumulate"):
        assert first[case]["buffers"] == second[case]["buffers"]
        assert any("running_mean" in name for name in first[case]["buffers"])


@pytest.mark.parametrize("cell", TWO)
def test_an_overflow_on_one_rank_is_skipped_by_all(cell: str, base: Path) -> None:
    first, second = (rank["overflow"] for rank in outcome(cell, base))
    assert first["updates"] == second["updates"] < STEPS  # some were skipped, not all
    assert first["updates"] > 0
    assert first["scale"] == second["scale"] < 65536.0
    state = last_state(base, cell, "overflow")
    assert (state["progress"]["step"], state["progress"]["updates"]) == (STEPS, first["updates"])
    assert all(math.isfinite(float(t.float().abs().max())) for t in state["model"].values())


@pytest.mark.parametrize("cell", TWO)
@pytest.mark.parametrize("case", ["unused", "unused_accumulate"])
def test_a_parameter_that_no_rank_used_is_left_untouched(cell: str, case: str, base: Path) -> None:
    state, first = last_state(base, cell, case), first_model(base, cell, case).state_dict()
    for name in ("never.weight", "never.bias"):
        assert torch.equal(state["model"][name], first[name])
    assert not torch.equal(state["model"]["sometimes.weight"], first["sometimes.weight"])
    assert len(state["optimizer"]["state"]) == 4  # none for `never`
