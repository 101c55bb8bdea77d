"""scaling --simulate: records what happens in a backward, and shows what follows from it."""

import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launchers import Result
from matplotlib.figure import Figure
from torch import nn

from hvd_ddp.commands.simulate_plot import draw
from hvd_ddp.commands.simulate_record import record
from hvd_ddp.commands.simulate_table import Point
from hvd_ddp.costs import Costs, Gradient

Cli = Callable[..., Result]
SLEEP = 0.03
COSTS = Costs("net", "about", 8, 0.1, 1e-10, (Gradient(0.01, 4_000_000), Gradient(0.06, 1000)))


class SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP)
        return gradient


class TwoLayers(nn.Module):
    """Its backward sleeps between the two; its forward does as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLEEP)
        return self.last(SlowGradient.apply(self.first(x)))


def test_when_gradients_are_ready() -> None:
    model, optimizer_seconds = TwoLayers(), 0.02

    def step() -> None:
        model(torch.ones(3, 4)).sum().backward()
        time.sleep(optimizer_seconds)

    costs = record(model, step, name="two", about="here", samples=3)
    assert {g.size for g in costs.gradients[:2]} == {4 * 16, 4 * 2} and costs.gradients[1].ready < SLEEP
    assert {g.size for g in costs.gradients[2:]} == {4 * 32, 4 * 8} and costs.gradients[2].ready >= SLEEP
    assert costs.step >= 2 * SLEEP + optimizer_seconds and costs.backward < costs.step - SLEEP - optimizer_seconds / 2
    assert 0 < costs.adding < 1e-7
    busy = record(model, step, name="two", about="here", samples=3, clock=time.thread_time)
    assert 0 < busy.step < 2 * SLEEP, "without what it slept"
    assert not model._forward_hooks and not model.last.weight._post_accumulate_grad_hooks


def test_from_a_recording_to_pictures(cli: Cli) -> None:
    result = cli("scaling", "--simulate", "--threads", "1", "--gbit", "1", "25", "--global-batch", "8")
    assert result.code == 0, result.text
    assert "convnet: 8 samples a rank" in result.out and "8.698 MB of gradients" in result.out
    assert "5 us a message, 95 % of its rate" in " ".join(result.out.split())
    assert sorted(path.name for path in Path.cwd().iterdir()) == [
        f"simulated.{k}" for k in ("csv", "json", "png", "svg")
    ]
    with Path("simulated.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["gbit_per_second"], row["all_reduce"], row["ranks"]) for row in rows[:26:13]] == [
        ("1", "ring", "1"), ("1", "tree", "1")
    ]  # fmt: skip
    assert len(rows) == 2 * 2 * 13 and rows[-1]["ranks"] == "4096"
    assert all(float(row["efficiency"]) == 1 and float(row["exposed_seconds"]) == 0 for row in rows[::13])
    for row in rows:
        assert float(row["efficiency"]) == pytest.approx(
            1 - float(row["exposed_seconds"]) / float(row["step_seconds"]), rel=1e-4
        )
    sizes = [size for _, size in json.loads(Path("simulated.json").read_text())["gradients"]]
    assert sum(sizes) == int(rows[0]["gradient_bytes"]) and set(sizes[:2]) == {4 * 2560, 4 * 10}, "the last layer first"
    again = cli("scaling", "--simulate", "--costs", "simulated.json", "--step-seconds", "0.001", "--json")
    assert again.code == 0, again.text
    found = json.loads(again.out)["rows"]
    assert len(found) == 3 * 2 * 13 and found[0]["step_seconds"] == 0.001
    assert found[12]["efficiency"] < found[11]["efficiency"]


def test_the_picture() -> None:
    figure = Figure()
    found = [
        Point(COSTS, 10.0, algorithm, ranks, 0.0 if ranks == 1 else 0.1)
        for algorithm in ("ring", "tree")
        for ranks in (1, 2)
    ]
    draw(figure, found, "simulated")
    above, below = figure.axes
    assert [list(line.get_ydata()) for line in above.lines] == [[100.0, 50.0]] * 2
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in below.lines] == [([2], [100.0])] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["10 Gbit/s, ring", "10 Gbit/s, tree"]
    assert (above.get_ylabel(), below.get_ylabel(), below.get_xlabel()) == (
        "efficiency, %",
        "exposed, ms a step",
        "ranks",
    )


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--gbit", "0"], "--gbit is `(0.0,)`"),
        (["--step-seconds", "0"], "--step-seconds is `0.0`"),
        (["--goodput", "1.1"], "--goodput is `1.1`"),
        (["--latency-us", "-1"], "--latency-us is `-1.0`"),
        (["--host-ns", "nan"], "--host-ns is `nan`"),
        (["--costs", "a", "b", "--step-seconds", "1"], "--costs has `2` files"),
        (["--costs", "nowhere"], "`nowhere` holds no costs of a step: [Errno 2]"),
        (["--costs", "letter"], "`letter` holds no costs of a step"),
        (["--compression", "fp16"], "--compression and --adasum are not simulated"),
        (["--costs", "net.json", "--output", "nowhere/x"], "can't be written"),
        (["--output", "taken"], "`taken.json` holds no costs"),
        (["--repeats", "2"], "--repeats"),
    ],
    ids=" ".join,
)
def test_bad_input(options: list[str], wanted: str, cli: Cli) -> None:
    Path("net.json").write_text(json.dumps(COSTS.to_dict()))
    for name in ("letter", "taken.json"):
        Path(name).write_text("Dear all")
    result = cli("scaling", "--simulate", *options)
    said = " ".join(result.err.replace("│", " ").split())
    assert result.code == 2 and wanted in said and "Traceback" not in result.err, result.text
    assert Path("taken.json").read_text() == "Dear all"
