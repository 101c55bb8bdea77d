"""Where the time goes: phases, and the rank that the others wait for."""

import math
from pathlib import Path

import numpy as np
import pytest
from launchers import command, run
from rundir import rows, summary

from hvd_ddp.anatomy import alone, shares, slowest
from hvd_ddp.job.pulse import Pulse


def test_the_slowest_rank() -> None:
    """Against the median of the others; `seconds` is what it is behind, a step."""
    hosts = ["a", "a", "b", "b"]
    table = np.array([[0.1, 1.0], [0.1, 1.1], [0.1, 1.5], [0.2, 1.0]])
    found = slowest(table, hosts, seconds=4.0, num_steps=10)
    assert found == {"rank": 2, "host": "b", "phase": "forward", "seconds": pytest.approx(0.05)}
    table[3, 0] = 2.0
    found = slowest(table, hosts, seconds=4.0, num_steps=10)
    assert found == {"rank": 3, "host": "b", "phase": "loading data", "seconds": pytest.approx(0.18)}
    assert slowest(table, hosts, seconds=40.0, num_steps=10) is None, "less than a tenth"
    assert slowest(table[:1], hosts, seconds=0.1, num_steps=1) is None, "nobody waits"


def test_shares() -> None:
    assert shares({"a": 1.0, "b": 3.0, "c": 0.0001}) == {"b": 0.75, "a": 0.25}
    assert list(shares({"a": 1.0, "b": 3.0})) == ["b", "a"] and shares({}) == {}
    assert alone({"forward": 2.0, "backward": 9.0}) == [0.0, 2.0]


def test_a_pulse_counts_the_time_in_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    pulse = Pulse()
    for seconds, phase in ((1.0, "forward"), (2.0, "backward"), (4.0, "forward")):
        now += seconds
        pulse.at(phase)
    now += 8.0
    with pulse.long_work("saving"):
        now += 16.0
    now += 32.0
    assert pulse.lap() == {"starting": 1.0, "forward": 2.0 + 8.0 + 32.0, "backward": 4.0, "saving": 16.0}
    now += 64.0
    assert pulse.lap() == {"forward": 64.0} and pulse.phase == "forward"


SLOW = """
import sys, time, torch
from torch import nn
from hvd_ddp import TrainConfig, Trainer, connect
from hvd_ddp.data.datasets import load
from hvd_ddp.job.health import ends_together

def wait(*_):
    if backend.launch.rank == 1:
        time.sleep(0.03)

def slow(steps):
    for step in steps:
        wait()
        yield step

backend = connect(sys.argv[1], threads=1, device="cpu")
with ends_together(backend.meeting, timeout=60), backend:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    config = TrainConfig(max_steps=40, run_dir="run", optimizer="sgd")
    trainer = Trainer(config, model, torch.optim.SGD(model.parameters()), load("digits"), backend)
    if sys.argv[2] == "forward":
        model.register_forward_pre_hook(wait)
    else:
        steps = trainer.feed.steps
        trainer.feed.steps = lambda *arguments: slow(steps(*arguments))
    trainer.fit()
"""


@pytest.mark.parametrize(
    ("launcher", "backend", "phase"),
    [
        ("torchrun", "ddp", "loading data"),
        pytest.param("torchrun", "ddp", "forward", marks=pytest.mark.full),
        pytest.param("mpirun", "horovod", "loading data", marks=pytest.mark.full),
        ("mpirun", "horovod", "forward"),
    ],
)
def test_a_rank_that_is_slower_is_named(launcher: str, backend: str, phase: str, tmp_path: Path) -> None:
    """By 30 ms a step, within two lines of metrics."""
    (tmp_path / "program.py").write_text(SLOW)
    result = run(command(launcher, 2, ["program.py", backend, phase]), cwd=tmp_path)
    assert result.code == 0, result.text[-3000:]
    lines = rows(tmp_path / "run", "train")
    assert len(lines) == 4
    named = [(line["slowest"]["rank"], line["slowest"]["phase"]) for line in lines[:2] if "slowest" in line]
    assert (1, phase) in named, lines
    assert f": {phase}, 0.0" in result.out and "waiting for rank 1 (" in result.out
    for line in lines:
        assert math.isclose(sum(line["phases"].values()), 1.0, abs_tol=0.02)
    assert {"loading data", "forward", "backward", "averaging gradients", "updating parameters"} <= set(line["phases"])
    phases = summary(tmp_path / "run")["phases"]
    assert max(phases, key=lambda name: phases[name]) != "forward", "rank 0 is not the slow one"
