"""Random sizes and options under both backends, against one process. Long: run with -m full."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from launchers import command, run

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import cases  # noqa: E402
import test_contract as contract  # noqa: E402
from reference import one_process  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]
NUM_CASES = 24


def random_cases(seed: int, num_ranks: int) -> dict:
    """Batches of 16, as the references expect; everything else by chance."""
    chance = random.Random(seed)
    drawn = {}
    for number in range(NUM_CASES):
        options: dict = {
            "optimizer": chance.choice(["sgd", "adam", "adamw"]),
            "lr": chance.choice([0.002, 0.01, 0.03]),
            "weight_decay": chance.choice([0.0, 0.01, 0.2]),
            "accumulate": chance.choice([accumulate for accumulate in (1, 2, 3, 4) if accumulate * num_ranks <= 16]),
            "label_smoothing": chance.choice([0.0, 0.1]),
            "precision": "fp64",
            "find_unused_parameters": True,
        }
        if chance.random() < 0.5:
            options["clip_norm"] = chance.choice([0.1, 0.5, 2.0])
        if chance.random() < 0.5:
            options |= {"schedule": "cosine", "warmup_steps": chance.choice([0, 4])}
        drawn[f"random_{number}"] = (chance.choice(["Plain", "Branching"]), chance.randint(31, 80), options)
    return drawn


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_random_cases(num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random_cases(num_ranks, num_ranks)
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(drawn))
    cells = [("ddp", "gloo", "torchrun"), ("ddp", "mpi", "mpirun"), ("horovod", "mpi", "mpirun")]
    for backend, transport, launcher in cells:
        out = tmp_path / f"{backend}-{transport}"
        out.mkdir()
        program = [str(HERE / "worker.py"), str(out), "--backend", backend, "--transport", transport]
        result = run(command(launcher, num_ranks, [*program, "--file", str(file), "--cases", *drawn]), timeout=800)
        assert result.code == 0, result.text[-4000:]
    monkeypatch.setattr(cases, "CASES", {**cases.CASES, **drawn})
    for name, (model_name, num_samples, options) in drawn.items():
        states = [load(tmp_path / f"{backend}-{transport}" / name) for backend, transport, _ in cells]
        if num_ranks == 2:
            for state in states[1:]:
                contract.assert_same_bits(state, states[0])
        model = cases.MODELS[model_name]().double()
        model.load_state_dict(torch.load(tmp_path / "ddp-gloo" / f"{name}.first.pt", weights_only=True))
        inputs, targets = contract.normalised(num_samples, torch.float64)
        wanted = one_process(model, inputs, targets, contract.steps_of(num_samples), options).state_dict()
        for state in states:
            contract.assert_close(state["model"], wanted, 1e-12)


def load(folder: Path) -> dict:
    return torch.load(folder / "checkpoints" / f"step_{cases.STEPS:08d}.pt", weights_only=True)
