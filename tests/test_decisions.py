"""What all ranks decide alike: to skip or to stop at a gradient that is not finite, to drop the rate, to end early."""

import math
from pathlib import Path

import pytest
import torch
from launchers import ROOT, Result, command, run
from rundir import different, newest, rows, summary, tensors

from hvd_ddp.backends import connect
from hvd_ddp.config import TrainConfig
from hvd_ddp.decisions import Decisions
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.finite import Finite

STEPS = 23  # an epoch of digits


def take(decisions: Decisions, config: TrainConfig, values: list[float]) -> list[tuple[int, int, int]]:
    """Stale, drops and the step of the best after each accuracy."""
    found = []
    for step, value in enumerate(values, 1):
        decisions.take(config, step, {"loss": 1.0, "accuracy": value})
        found.append((decisions.stale, decisions.drops, (decisions.best or {"step": 0})["step"]))
    return found


def test_what_evaluations_decide() -> None:
    config = TrainConfig(schedule="plateau", patience=2, early_stop=4)
    values = [0.5, 0.5, 0.4, 0.6, 0.6, 0.6, 0.6, math.nan]
    decisions = Decisions()
    assert take(decisions, config, values) == [
        (0, 0, 1), (1, 0, 1), (2, 1, 1), (0, 1, 4), (1, 1, 4), (2, 2, 4), (3, 2, 4), (4, 3, 4),
    ]  # fmt: skip
    assert decisions.end(config) and not decisions.end(TrainConfig())
    assert Decisions(**decisions.to_save()) == decisions


def test_the_best_evaluation() -> None:
    """By accuracy where there is one, else by loss; the first of equals; what is no number is never the best."""
    config, decisions = TrainConfig(), Decisions()
    for step, accuracy in enumerate([math.nan, 0.5, 0.7, 0.7, 0.6, math.inf]):
        decisions.take(config, step, {"loss": 1.0 - step, "accuracy": accuracy, "num_samples": 9})
        assert decisions.best == [None, *[{"step": 1, "accuracy": 0.5}], *[{"step": 2, "accuracy": 0.7}] * 4][step]
    decisions = Decisions()
    for step, loss in enumerate([math.nan, 0.5, 0.7, 0.3, 0.3, -math.inf]):
        decisions.take(config, step, {"loss": loss, "num_samples": 9})
        assert decisions.best == [None, *[{"step": 1, "loss": 0.5}] * 2, *[{"step": 3, "loss": 0.3}] * 3][step]
    decisions.take(config, 6, {"error": 0.1})
    assert decisions.best == {"step": 3, "loss": 0.3}
    decisions.take(config, 7, {"loss": 9.0, "accuracy": 0.1})
    assert decisions.best == {"step": 7, "accuracy": 0.1}


def start(launcher: str, folder: Path, *options: str, backend: str = "ddp", fault: str = "none@9") -> Result:
    program = ["-m", "hvd_ddp", "train", "--threads", "1", "--model", "factories:Small", "--backend", backend,
               "--run-dir", "run", *options]  # fmt: skip
    paths = f"{ROOT}:{ROOT / 'tests'}"
    folder.mkdir(exist_ok=True)
    return run(command(launcher, 2, program), cwd=folder, PYTHONPATH=paths, FAULT=fault)


@pytest.mark.parametrize(("launcher", "backend"), [("--nproc", "ddp"), ("mpirun", "horovod")])
def test_a_loss_that_is_not_finite_on_one_rank(launcher: str, backend: str, tmp_path: Path) -> None:
    """In step 4 (from 0) of rank 1: all stop there, nothing of it saved; or all skip that one step."""
    options = ["--model", "factories:Faulty", "--max-steps", "12", "--save-every", "1", "--log-every", "1"]
    result = start(launcher, tmp_path, *options, backend=backend, fault="nan@1")
    assert result.code != 0 and "Traceback" not in result.err, result.text[-3000:]
    assert "The gradient of step 4 (from 0) is not finite; the loss was not on rank 1." in result.err
    assert newest(tmp_path / "run")["progress"]["step"] == 4
    result = start(launcher, tmp_path / "other", *options, "--on-nan", "skip", backend=backend, fault="nan@1")
    assert result.code == 0, result.text[-3000:]
    state = newest(tmp_path / "other/run")
    assert (state["progress"]["step"], state["progress"]["updates"]) == (12, 11)
    assert all(bool(value.isfinite().all()) for value in tensors(state).values())
    trained = rows(tmp_path / "other/run", "train")
    assert [row.get("skipped_steps", 0) for row in trained] == [int(step == 4) for step in range(12)]
    assert [row["loss"] is None for row in trained] == [step == 4 for step in range(12)], "no sample counted there"


@pytest.mark.parametrize(
    ("every", "lines"), [(["--log-every", "3"], 1), (["--save-every", "2", "--log-every", "50"], 0)]
)
def test_one_that_is_seen_some_steps_later(every: list[str], lines: int, tmp_path: Path) -> None:
    """At the next line of metrics, or before the next save: it is told as that of step 4, and nothing of it is kept."""
    result = start("--nproc", tmp_path, "--model", "factories:Faulty", "--max-steps", "50", *every, fault="nan@1")
    assert result.code != 0 and "Traceback" not in result.err, result.text[-3000:]
    assert "The gradient of step 4 (from 0) is not finite; the loss was not on rank 1." in result.err
    trained = rows(tmp_path / "run", "train") if lines else []
    assert [row["step"] for row in trained] == [3] * lines
    if not lines:
        assert newest(tmp_path / "run")["progress"]["step"] == 4


def adam(*, gradient: float) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter, torch.nn.Parameter(torch.ones(0))])
    parameter.grad = torch.full((3,), gradient)
    optimizer.step()
    return optimizer


def test_what_must_not_be_saved(tmp_path: Path) -> None:
    """Large numbers may, of which the sum of squares would overflow."""
    with connect("local", threads=1, directory=tmp_path) as backend:
        finite = Finite(backend, skip=False)
        finite.check(adam(gradient=0.9e19), 1)
        for gradient in (math.nan, math.inf):
            with pytest.raises(HvdDDPError, match=r"step 7 \(from 0\) is not finite; all losses were\. Nothing"):
                finite.check(adam(gradient=gradient), 8)
        for step, loss in enumerate([1.0, math.inf, math.nan]):
            finite.stepped(step, torch.tensor(loss))
        with pytest.raises(HvdDDPError, match=r"step 1 \(from 0\) is not finite; the loss was not on rank 0\."):
            finite.look(torch.tensor(math.nan))


def test_skipping_for_ever_ends(tmp_path: Path) -> None:
    result = start("--nproc", tmp_path, "--lr", "1e38", "--optimizer", "sgd", "--epochs", "20", "--on-nan", "skip")
    assert result.code != 0, result.text[-3000:]
    assert "ranks 0, 1. Nothing of it is saved; all ranks stop. It is number 101 in a row" in result.err


def test_early_stop_and_then_nothing_to_do(tmp_path: Path) -> None:
    """With a rate of nothing the first evaluation stays the best; two more, and all ranks end after the same step."""
    options = ["--lr", "1e-30", "--epochs", "9", "--early-stop", "2"]
    assert start("--nproc", tmp_path, *options).code == 0
    found = summary(tmp_path / "run")
    assert (found["status"], found["steps"], found["best"]["step"]) == ("finished", 3 * STEPS, STEPS)
    result = start("--nproc", tmp_path, *options)
    assert result.code == 0 and "already finished" in result.out
    assert start("--nproc", tmp_path, *options[:-1], "4").code == 0  # a longer wait: it goes on
    assert summary(tmp_path / "run")["steps"] == 5 * STEPS


@pytest.mark.full
def test_the_plateau_schedule_goes_on_where_it_was(tmp_path: Path) -> None:
    """Rates so small that nothing gets better: dropped at every second evaluation after the first."""
    options = ["--schedule", "plateau", "--patience", "2", "--lr", "1e-30", "--decay-factor", "0.5",
               "--log-every", "1", "--epochs"]  # fmt: skip
    assert start("--nproc", tmp_path, *options, "6").code == 0
    rates = [row["lr"] for row in rows(tmp_path / "run", "train")]
    assert rates == [1e-30 * 0.5 ** max(0, (step // STEPS - 1) // 2) for step in range(6 * STEPS)]
    for epochs in ("2", "4", "6"):
        assert start("--nproc", tmp_path / "cut", *options, epochs).code == 0
    assert [row["lr"] for row in rows(tmp_path / "cut/run", "train")] == rates
    assert not different(tensors(newest(tmp_path / "cut/run")), tensors(newest(tmp_path / "run")))
    assert torch.equal(torch.tensor(rates[-1]), torch.tensor(1e-30 * 0.25))


TWO_MINDS = """
import sys, torch
from pathlib import Path
from torch import nn
from hvd_ddp import TrainConfig, Trainer, connect
from hvd_ddp.data.datasets import load
from hvd_ddp.job.health import ends_together
from hvd_ddp.tasks import Classification

class TwoMinds(Classification):
    def evaluate(self, model, batch):
        seen = [[.1, .2, .3, .4, .5, .6, .7], [.9, .85, .8, .65, .4, .1, 0]][backend.launch.rank]
        return {"loss": torch.zeros(()), "accuracy": torch.tensor(batch.num_samples * seen[trainer.step // 23 - 1])}

backend = connect(sys.argv[1], threads=1, device="cpu")
with ends_together(backend.meeting, timeout=60), backend:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    config = TrainConfig(epochs=7, early_stop=3, run_dir="run", optimizer="sgd")
    trainer = Trainer(config, model, torch.optim.SGD(model.parameters()), load("digits"), backend, task=TwoMinds())
    trainer.fit()
    Path(f"steps{backend.launch.rank}").write_text(str(trainer.step))
"""


@pytest.mark.parametrize(("launcher", "backend"), [("torchrun", "ddp"), ("mpirun", "horovod")])
def test_early_stop_on_a_metric_that_ranks_see_differently(launcher: str, backend: str, tmp_path: Path) -> None:
    """Rank 0 alone would never stop, rank 1 alone after the fourth evaluation; by their mean the third is the best."""
    (tmp_path / "program.py").write_text(TWO_MINDS)
    result = run(command(launcher, 2, ["program.py", backend]), cwd=tmp_path)
    assert result.code == 0, result.text[-3000:]
    assert [(tmp_path / f"steps{rank}").read_text() for rank in (0, 1)] == [str(6 * STEPS)] * 2
    found = summary(tmp_path / "run")
    assert (found["status"], found["steps"], found["best"]["step"]) == ("finished", 6 * STEPS, 3 * STEPS)
