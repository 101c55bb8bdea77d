"""Two hosts with a link of several rates: steps that the model of hvd_ddp/costs.py has not seen, it predicts.

On a machine that does nothing else; -s shows a table: python -m pytest -m full -s tests/slurm/test_prediction.py
"""

import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cluster.slurm import Cluster
from runs import QUIET
from scipy.optimize import least_squares

from hvd_ddp.costs import Costs, Link, exposed_on

HERE = Path(__file__).parent
TURNS = 3
WITHIN = 0.15
FITTED_MODELS, OTHER_MODELS = ["linear256", "linear512", "convnet"], ["linear362", "resnet18"]
FITTED_RATES, OTHER_RATES = [50, 200], [100]  # Mbit/s


class Measured(NamedTuple):
    """A model on two ranks with so many Mbit/s between them."""

    costs: Costs  # on one
    mbit: int
    seconds: float  # of a step

    @property
    def fitted(self) -> bool:
        return self.costs.model in FITTED_MODELS and self.mbit in FITTED_RATES

    def predicted(self, link: Sequence[float]) -> float:
        """Seconds of a step; `link`: microseconds a message, inverse goodput, nanoseconds of the core for a byte."""
        latency, inverse, host = link
        shaped = Link(self.mbit * 1e6, latency / 1e6, 1 / inverse, host / 1e9)
        return self.costs.step + exposed_on(self.costs, 2, shaped, "ring")


def measure(two: Cluster, folder: Path) -> list[Measured]:
    """Medians over the steps of all turns; in each turn there is one of every rate."""
    names = FITTED_MODELS + OTHER_MODELS
    rates = sorted(FITTED_RATES + OTHER_RATES)
    found = {(name, mbit): list[dict[str, Any]]() for name in names for mbit in rates}
    srun = ["srun", "-N2", "--ntasks-per-node=1", "--mpi=none"]
    for turn in range(TURNS):
        for mbit in rates:
            print(f"turn {turn + 1} of {TURNS}, {mbit} Mbit/s, load {os.getloadavg()[0]:.1f}", flush=True)
            for node in two.nodes:
                node.slow(mbit=mbit)
            try:
                result = two.run(*srun, "python", str(HERE / "prediction.py"), *names, cwd=folder, timeout=300, **QUIET)
            finally:
                for node in two.nodes:
                    node.unslow()
            assert result.code == 0, result.text[-3000:]
            line = next(line for line in result.out.splitlines() if line.startswith("measured "))
            for name, values in json.loads(line.removeprefix("measured ")).items():
                found[name, mbit].append(values)
    alone = {name: _median_step([v["costs"] for mbit in rates for v in found[name, mbit]]) for name in names}
    return [
        Measured(alone[name], mbit, statistics.median(s for v in values for s in v["seconds"]))
        for (name, mbit), values in found.items()
    ]


def _median_step(recorded: list[dict[str, Any]]) -> Costs:
    return sorted(map(Costs.from_dict, recorded), key=lambda costs: costs.step)[len(recorded) // 2]


def fit(cells: list[Measured]) -> list[float]:
    """The link for which logarithms of predicted and measured steps are nearest."""

    def errors(link: list[float]) -> list[float]:
        return [math.log(cell.predicted(link) / cell.seconds) for cell in cells]

    return least_squares(errors, [50.0, 1.05, 1.0], bounds=([0, 1, 0], [1e5, 5, 1e3]), x_scale=[50, 0.1, 1]).x.tolist()


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_what_was_not_fitted_is_predicted(two: Cluster, tmp_path: Path) -> None:
    cells = measure(two, tmp_path)
    link = fit([cell for cell in cells if cell.fitted])
    print(
        f"\nfitted: {link[0]:.0f} us a message, {100 / link[1]:.0f} % of the rate, {link[2]:.2f} ns of the core a byte"
    )
    print("model         MB  Mbit/s  alone ms  measured ms  predicted ms  error")
    for cell in cells:
        predicted = cell.predicted(link)
        print(
            f"{cell.costs.model:10} {cell.costs.size / 1e6:5.1f} {cell.mbit:7} {1e3 * cell.costs.step:9.1f}"
            f" {1e3 * cell.seconds:12.1f} {1e3 * predicted:13.1f} {100 * (predicted / cell.seconds - 1):+5.1f} %"
            + ("" if cell.fitted else "  held out")
        )
    errors = {(c.costs.model, c.mbit): c.predicted(link) / c.seconds - 1 for c in cells if not c.fitted}
    assert max(map(abs, errors.values())) <= WITHIN, errors
