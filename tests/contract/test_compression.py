"""Gradients that travel in fewer bytes, or are combined otherwise, against numpy; what can't be done is refused."""

import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from launchers import command, run, train

from hvd_ddp import Communication, HvdDDPError, TrainConfig, Trainer, connect
from hvd_ddp.backends import compression as hooks
from hvd_ddp.backends.ddp import DDPBackend
from hvd_ddp.backends.horovod import HorovodBackend
from hvd_ddp.job.launch import Launch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from compression_worker import BROKEN, FULL_STEPS, SHAPES, STEPS, gradient, thin  # noqa: E402
from rundir import different, distance, newest, tensors  # noqa: E402

# name: (launcher, ranks, backend, transport, forms)
CELLS = {
    "ddp-mpi": ("mpirun", 2, "ddp", "mpi", ["none", "fp16", "bf16", "powersgd"]),
    "ddp-gloo": ("torchrun", 2, "ddp", "gloo", ["fp16", "bf16", "powersgd"]),
    "horovod-mpi": ("mpirun", 2, "horovod", "mpi", ["fp16", "adasum"]),
    "horovod-gloo": ("torchrun", 2, "horovod", "gloo", ["fp16"]),
    "horovod-mpi-4": ("mpirun", 4, "horovod", "mpi", ["adasum"]),
}
EACH = [(cell, form) for cell, (_, _, _, _, forms) in CELLS.items() for form in forms]
OF_TWO = [(cell, form) for cell, form in EACH if CELLS[cell][1] == 2]
POWERSGD = [cell for cell, form in EACH if form == "powersgd"]
COLUMNS = 4  # of PowerSGD's matrices


@functools.cache
def outcome(cell: str, base: Path) -> dict:
    """Run the cell once; what rank 0 saw, and every rank alike."""
    launcher, num_ranks, backend, transport, forms = CELLS[cell]
    out = base / cell
    if out.exists():
        pytest.fail("this cell has failed already")
    out.mkdir()
    program = [str(HERE / "compression_worker.py"), str(out), backend, transport, *forms]
    result = run(command(launcher, num_ranks, program), timeout=300)
    assert result.code == 0, result.text[-6000:]
    first, *others = (json.loads(path.read_text()) for path in out.glob("seen*.json"))
    assert len(others) == num_ranks - 1
    return first


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compression")


def results(base: Path, cell: str, what: str) -> list[dict[str, np.ndarray]]:
    """What came of each step's gradients: of rank 0, and the same bits on all ranks."""
    outcome(cell, base)
    ranks = [torch.load(base / cell / f"{what} {rank}.pt", weights_only=True) for rank in range(CELLS[cell][1])]
    for steps in ranks[1:]:
        for mine, first in zip(steps, ranks[0], strict=True):
            assert all(mine[name].numpy().tobytes() == first[name].numpy().tobytes() for name in SHAPES)
    return [{name: step[name].numpy() for name in SHAPES} for step in ranks[0]]


def own(rank: int, name: str) -> np.ndarray:
    """A rank's gradient over both micro-batches."""
    return gradient(rank, name, 0).numpy() + gradient(rank, name, 1).numpy()


def bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest float32 whose lower half is zero; of two the even one."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def mean_of_halves(name: str, form: str) -> np.ndarray:
    first, second = own(0, name), own(1, name)
    if form == "bf16":
        return bfloat16(bfloat16(bfloat16(first) / 2) + bfloat16(bfloat16(second) / 2))
    two = np.float16(2)
    return (first.astype(np.float16) / two + second.astype(np.float16) / two).astype(np.float32)


def adasum(name: str, num_ranks: int) -> np.ndarray:
    """Maleki et al. 2020, arxiv.org/abs/2006.02924: neighbours first, then the pairs."""
    parts = [own(rank, name).astype(np.float64) for rank in range(num_ranks)]
    while len(parts) > 1:
        parts = [
            a * (1 - (a * b).sum() / (2 * (a * a).sum())) + b * (1 - (a * b).sum() / (2 * (b * b).sum()))
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


@pytest.mark.parametrize(("cell", "form"), [pair for pair in EACH if pair[1] in ("fp16", "bf16")])
def test_the_mean_of_halves(cell: str, form: str, base: Path) -> None:
    """To the last bit, also where the sum of two ranks is beyond fp16."""
    for step in results(base, cell, form):
        for name in SHAPES:
            wanted = mean_of_halves(name, form)
            assert np.isfinite(wanted).all()
            assert form == "bf16" or own(0, name).max() + own(1, name).max() > np.finfo(np.float16).max
            np.testing.assert_array_equal(step[name], wanted)


@pytest.mark.parametrize(("cell", "form"), [pair for pair in EACH if pair[1] == "adasum"])
def test_adasum(cell: str, form: str, base: Path) -> None:
    for step in results(base, cell, form):
        for name in SHAPES:
            wanted = adasum(name, CELLS[cell][1])
            assert np.linalg.norm(step[name] - wanted) <= 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("cell", POWERSGD)
def test_powersgd_begins_with_whole_averages(cell: str, base: Path) -> None:
    for step in results(base, cell, "powersgd"):
        for name in SHAPES:
            np.testing.assert_allclose(step[name], (own(0, name) + own(1, name)) / 2, rtol=1e-6)


@pytest.mark.parametrize("cell", POWERSGD)
def test_powersgd_of_what_has_few_columns_is_exact(cell: str, base: Path) -> None:
    """The mean of two matrices of rank one has rank two."""
    *_, last = steps = results(base, cell, "low rank")
    assert len(steps) > FULL_STEPS + 1
    for name in SHAPES:
        wanted = (thin(0, name).numpy() + thin(1, name).numpy()) / 2
        assert np.linalg.norm(last[name] - wanted) <= 1e-5 * np.linalg.norm(wanted)


@pytest.mark.parametrize("cell", POWERSGD)
def test_powersgd_approximates_and_makes_good(cell: str, base: Path) -> None:
    """Each step has few columns; over the steps what was left out is given."""
    steps = results(base, cell, "constant")[BROKEN + 1 :]  # it has begun anew there, without whole averages
    for name in ("wide", "tall"):
        wanted = (gradient(0, name).numpy() + gradient(1, name).numpy()) / 2
        wanted.reshape(-1)[:3] = 0.0
        assert {int(np.linalg.matrix_rank(step[name], tol=1e-4)) for step in steps} == {COLUMNS}
        distances = [
            np.linalg.norm(np.mean([step[name] for step in steps[:number]], axis=0) - wanted) / np.linalg.norm(wanted)
            for number in (1, len(steps))
        ]
        assert distances[0] > 0.6 and distances[1] < 0.4, distances
    mean = (gradient(0, "vector").numpy() + gradient(1, "vector").numpy()) / 2
    np.testing.assert_allclose(steps[-1]["vector"][3:], mean[3:], atol=1e-5)


@pytest.mark.parametrize("cell", POWERSGD)
def test_powersgd_survives_what_is_no_number(cell: str, base: Path) -> None:
    steps = results(base, cell, "constant")
    finite = [all(np.isfinite(step[name]).all() for name in SHAPES) for step in steps]
    assert finite == [number != BROKEN for number in range(STEPS)]


@pytest.mark.parametrize("cell", POWERSGD)
def test_the_size_of_buckets(cell: str, base: Path) -> None:
    outcome(cell, base)
    first = torch.load(base / cell / "constant 0.pt", weights_only=True)[0]
    assert first["buckets"] == 2  # of 0.01 MiB: one for each matrix, the vector with one of them
    assert torch.load(base / cell / "fp16 0.pt", weights_only=True)[0]["buckets"] == 1


@pytest.mark.parametrize(("cell", "form"), OF_TWO)
def test_it_learns_as_well(cell: str, form: str, base: Path) -> None:
    accuracy = outcome(cell, base)[form]["accuracy"]
    assert accuracy == pytest.approx(outcome("ddp-mpi", base)["none"]["accuracy"], abs=0.01)
    assert accuracy > 0.96


@pytest.mark.parametrize(("cell", "form"), [pair for pair in OF_TWO if pair[1] in ("fp16", "powersgd")])
def test_a_run_in_parts(cell: str, form: str, base: Path) -> None:
    """fp16 goes on with the same bits; powersgd near them, for it forgets what it has left out."""
    outcome(cell, base)
    straight, stopped = (tensors(newest(base / cell / f"{form} {kind}")) for kind in ("straight", "stopped"))
    assert straight["step"] == stopped["step"] == 30
    if form == "fp16":
        assert different(stopped, straight) == []
    else:
        model = [name for name in straight if name.startswith("model")]
        assert 0 < distance({n: stopped[n] for n in model}, {n: straight[n] for n in model}) < 0.1


def test_horovods_settings(tmp_path: Path) -> None:
    records = {"HOROVOD_TIMELINE": str(tmp_path / "timeline"), "HOROVOD_AUTOTUNE_LOG": str(tmp_path / "tuning")}
    program = [str(HERE / "compression_worker.py"), str(tmp_path), "knobs"]
    result = run(command("mpirun", 2, program), timeout=150, **records)
    assert result.code == 0, result.text[-6000:]
    (seen,) = filter(None, (json.loads(path.read_text()) for path in tmp_path.glob("seen*.json")))
    assert seen["plain"]["seconds"] < 0.05 <= seen["set"]["seconds"]
    assert seen["plain"]["buckets"] == 1 < seen["set"]["buckets"]
    assert [seen[name]["tuned"] for name in ("plain", "set")] == [False, True]
    assert all(kind["reduced"] and kind["left"] == [] for kind in seen.values())


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
REFUSED = [
    (HorovodBackend, {"compression": "bf16"}, "mpi", 2, "Horovod sums no bfloat16. Use --compression fp16, or --back"),
    (HorovodBackend, {"compression": "powersgd"}, "mpi", 2, "a hook of torch's DDP, Horovod has none. Use --compre"),
    (HorovodBackend, {"bucket_mb": 1.0}, "mpi", 2, "--bucket-mb is of DDP's buckets, .* Use --fusion-mb"),
    (HorovodBackend, {"adasum": True}, "gloo", 2, "--adasum: Horovod does it over MPI alone, .* over `gloo`"),
    (HorovodBackend, {"adasum": True}, "mpi", 6, "--adasum joins ranks in pairs, and there are `6`. Start 2, 4, 8"),
    (DDPBackend, {"adasum": True}, "mpi", 2, "--adasum tells Horovod .* Use --backend horovod, or leave it out"),
    (DDPBackend, {"fusion_mb": 0.0}, "mpi", 2, "--fusion-mb tells Horovod .* --backend horovod, or --bucket-mb"),
    (DDPBackend, {"cycle_ms": 1.0}, "gloo", 2, "--cycle-ms tells Horovod"),
    (DDPBackend, {"autotune": True}, "nccl", 2, "--autotune tells Horovod"),
]


@pytest.mark.parametrize(("backend", "told", "transport", "ranks", "wanted"), REFUSED)
def test_what_can_not_be_done_is_refused(backend: type, told: dict, transport: str, ranks: int, wanted: str) -> None:
    with pytest.raises(HvdDDPError, match=wanted):
        backend.check(Communication(**told), transport, Launch("mpirun", world_size=ranks), CPU)


def test_what_depends_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, both = Launch("mpirun", world_size=2), Communication(adasum=True, compression="fp16")
    powersgd = Communication(compression="powersgd")
    DDPBackend.check(powersgd, "gloo", pair, CPU)
    HorovodBackend.check(both, "mpi", pair, CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    DDPBackend.check(powersgd, "nccl", pair, GPU)
    with pytest.raises(HvdDDPError, match="Hide the GPUs with CUDA_VISIBLE_DEVICES="):
        DDPBackend.check(powersgd, "gloo", pair, CPU)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(HvdDDPError, match="in 16 bits on x86_64 alone, and this is `aarch64`"):
        HorovodBackend.check(both, "mpi", pair, CPU)


def test_what_the_user_has_set_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    pair = Launch("mpirun", world_size=2)
    HorovodBackend.check(Communication(fusion_mb=1.0), "mpi", pair, CPU)
    HorovodBackend.check(Communication(cycle_ms=5.0), "mpi", pair, CPU)
    with pytest.raises(HvdDDPError, match=r"HOROVOD_CYCLE_TIME is `5` in the environment, .* `0.5`: only one can hold"):
        HorovodBackend.check(Communication(cycle_ms=0.5), "mpi", pair, CPU)


def test_refused_by_all_ranks_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = train("mpirun", 2, "--backend", "horovod", "--compression", "powersgd", "--run-dir", str(folder))
    assert result.code == 2, result.text
    assert [line for line in result.err.splitlines() if line.startswith("hvd_ddp: ")] == [
        "hvd_ddp: --compression powersgd: PowerSGD is a hook of torch's DDP, Horovod has none. Use --compression fp16, "
        "or --backend ddp."
    ]
    assert "Traceback" not in result.text and not folder.exists()


def test_one_process_has_nothing_to_compress(tmp_path: Path) -> None:
    """A run of several ranks may go on in one, as it may without compression."""
    folder = tmp_path / "run"
    told = ["--compression", "powersgd", "--bucket-mb", "5", "--max-steps"]
    result = train("torchrun", 2, *told, "12", "--run-dir", str(folder))
    assert result.code == 0, result.text[-3000:]
    assert ", compression powersgd, bucket mb 5.0" in " ".join(result.out.split())
    result = train("python", 1, *told, "15", "--run-dir", str(folder))
    assert result.code == 0 and "resuming from" in result.out, result.text[-3000:]
    result = train("torchrun", 2, "--max-steps", "18", "--run-dir", str(folder))
    assert result.code != 0
    assert "compression `powersgd`, this run has `none`" in " ".join(result.err.split())


def test_a_trainer_whose_backend_was_told_otherwise(tmp_path: Path) -> None:
    config = TrainConfig(compression="fp16", run_dir=tmp_path / "run")
    with connect("local", "auto", "cpu") as backend, pytest.raises(HvdDDPError, match=r"connect\(communication=config"):
        Trainer(config, torch.nn.Linear(1, 1), None, None, backend)  # type: ignore[arg-type]


def test_a_parameter_without_a_dimension() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.0))

    wrapped = type("Wrapped", (), {"module": Scaled()})()
    with pytest.raises(HvdDDPError, match=r"parameter `scale` has no dimension, .* the shape \(1,\)"):
        hooks.PowerSGD().register(wrapped)
