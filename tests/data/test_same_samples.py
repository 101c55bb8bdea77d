"""Real runs: which samples each step uses, and how each looks, on any number of ranks and across stops."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from launchers import ROOT, command, run
from own_data import jittered
from recorder import hashes
from rundir import distance, newest, tensors

from hvd_ddp.data.augment import Augmentation
from hvd_ddp.data.datasets import load
from hvd_ddp.data.items import Reader, Request
from hvd_ddp.data.loader import ArrayLoader
from hvd_ddp.data.own import OwnItems
from hvd_ddp.data.sampler import permutation

STEPS, EPOCH, BATCH, SEED = 30, 23, 64, 11  # digits: 1,437 samples, the last batch of an epoch has 29


def start(
    folder: Path, num_ranks: int, steps: int, *options: str, accumulate: int = 1, launcher: str = "--nproc"
) -> list[list[str]]:
    """What the job was shown in each of its steps, by rank."""
    here = folder / f"{num_ranks}-{steps}"
    here.mkdir()
    program = ["-m", "hvd_ddp", "train", "--model", "recorder:Recorder", "--seed", str(SEED), "--threads", "1",
               "--max-steps", str(steps), "--accumulate", str(accumulate), "--run-dir", str(folder / "run"),
               "--eval-every", "9", *options]  # fmt: skip
    result = run(command(launcher, num_ranks, program), cwd=here, PYTHONPATH=f"{ROOT}:{Path(__file__).parent}")
    assert result.code == 0, result.text[-4000:]
    ranks = []
    for rank in range(num_ranks):
        lines = [json.loads(line) for line in (here / f"seen-{rank}.jsonl").read_text().splitlines()]
        ranks.append([list(chain(*lines[at : at + accumulate])) for at in range(0, len(lines), accumulate)])
    return [list(chain(*step)) for step in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def wanted() -> list[list[str]]:
    """Each step's samples by the order, each as it looks by itself."""
    data = load("digits")
    augment = Augmentation(SEED, padding=(1, 1))
    loader = ArrayLoader(data.train, augment, mean=data.mean, std=data.std, device="cpu", dtype=torch.float32)
    steps = []
    for step in range(STEPS):
        epoch, position = divmod(step, EPOCH)
        order = permutation(len(data.train), SEED, epoch)[position * BATCH : (position + 1) * BATCH]
        alone = [loader.micro_batches(np.array([index]), 1, epoch)[0].inputs for index in order]
        steps.append(hashes(torch.cat(alone)))
    return steps


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_on_any_number_of_ranks(num_ranks: int, wanted: list, tmp_path: Path) -> None:
    assert start(tmp_path, num_ranks, STEPS, "--augment", "standard") == wanted


@pytest.mark.full
def test_across_stops_on_other_numbers_of_ranks(wanted: list, tmp_path: Path) -> None:
    """Stopped twice in the first epoch, once in the second."""
    first = start(tmp_path, 2, 7, "--augment", "standard", accumulate=2)
    second = start(tmp_path, 3, 12, "--augment", "standard")
    third = start(tmp_path, 1, 26, "--augment", "standard", accumulate=3)
    fourth = start(tmp_path, 2, STEPS, "--augment", "standard")
    assert first + second + third + fourth == wanted


@pytest.mark.timeout(200)
def test_from_horovod_on_four_ranks_to_ddp_on_three_to_one_process(tmp_path: Path) -> None:
    """Each sample once an epoch, and in float64 the weights of a run that was never stopped."""
    options = ("--augment", "standard", "--precision", "fp64", "--optimizer", "adamw", "--schedule", "constant")
    parts = [
        start(tmp_path, 4, 9, *options, "--backend", "horovod", launcher="mpirun"),
        start(tmp_path, 3, 17, *options, "--backend", "ddp"),
        start(tmp_path, 1, STEPS, *options, launcher="python"),
    ]
    (tmp_path / "whole").mkdir()
    whole = start(tmp_path / "whole", 1, STEPS, *options, launcher="python")
    assert list(chain(*parts)) == whole
    assert sum(map(len, whole[:EPOCH])) == len(set(chain(*whole[:EPOCH]))) == 1437
    assert distance(tensors(newest(tmp_path / "run")), tensors(newest(tmp_path / "whole/run"))) < 1e-12


# ---- samples read one at a time, with random numbers of the data set's own


@pytest.fixture(scope="module")
def jittered_steps() -> list[list[str]]:
    """100 samples in steps of 16: 7 an epoch; each step's samples by the order, each as it looks by itself."""
    items = OwnItems("own_data:jittered, train", jittered(None)[0])
    read = Reader((items, items), 3, SEED, False, False, 0, 1)
    steps = []
    for step in range(18):
        epoch, position = divmod(step, 7)
        order = permutation(100, SEED, epoch)[position * 16 : (position + 1) * 16]
        steps.append(hashes(torch.cat([read(Request(0, np.array([index]), epoch)).inputs for index in order])))
    return steps


def start_own(folder: Path, num_ranks: int, steps: int, workers: int) -> list[list[str]]:
    own = ["--data", "own_data:jittered", "--global-batch", "16", "--workers", str(workers)]
    return start(folder, num_ranks, steps, *own)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("num_ranks", "workers"),
    [pytest.param(1, 0, marks=pytest.mark.full), (2, 3), (3, 1), pytest.param(4, 0, marks=pytest.mark.full)],
)
def test_own_samples_on_any_number_of_ranks_and_workers(
    num_ranks: int, workers: int, jittered_steps: list, tmp_path: Path
) -> None:
    assert start_own(tmp_path, num_ranks, 18, workers) == jittered_steps


@pytest.mark.full
@pytest.mark.timeout(300)
def test_own_samples_across_stops(jittered_steps: list, tmp_path: Path) -> None:
    """Stopped twice in one epoch; other ranks, other workers each time."""
    parts = [start_own(tmp_path, *each) for each in ((2, 2, 3), (3, 5, 0), (1, 12, 1), (2, 18, 0))]
    assert list(chain(*parts)) == jittered_steps
