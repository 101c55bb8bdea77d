"""scaling --simulate: the picture, efficiency above exposed communication, a column a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvd_ddp.commands.plot import STYLES
from hvd_ddp.commands.simulate_table import SIZES, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHES: dict[str, Any] = {"ring": "-", "tree": (0, (4, 2))}
LEAST = 1e-3  # milliseconds: what is hidden but for less counts as hidden, for a logarithmic axis has no zero
TICK = 3  # of so many sizes one has a label and its marker
WIDE = 1e3  # highest over lowest, from which powers of ten are enough


def draw(figure: Figure, found: Sequence[Point], title: str) -> None:
    """A colour and a marker for each rate, dashes for each way to reduce."""
    models = list(dict.fromkeys(point.costs for point in found))
    rates = list(dict.fromkeys(point.gbit for point in found))
    panels = figure.subplots(2, len(models), sharex=True, sharey="row", squeeze=False)
    for column, costs in enumerate(models):
        above, below = panels[:, column]
        for number, gbit in enumerate(rates):
            for algorithm in dict.fromkeys(point.algorithm for point in found):
                own = [p for p in found if (p.costs, p.gbit, p.algorithm) == (costs, gbit, algorithm)]
                look = _look(number, algorithm)
                above.plot([p.ranks for p in own], [100 * p.efficiency for p in own], markevery=TICK, **look)
                shown = [p for p in own if 1000 * p.exposed >= LEAST]
                label = f"{gbit:g} Gbit/s, {algorithm}" if column == 0 else None
                marked = [number for number, p in enumerate(shown) if p.ranks in SIZES[::TICK]]
                below.plot(
                    [p.ranks for p in shown], [1000 * p.exposed for p in shown], label=label, markevery=marked, **look
                )
        above.set_title(
            f"{costs.model}, {costs.samples} a rank\n{costs.size / 1e6:.3g} MB, {1000 * costs.step:,.4g} ms a step",
            fontsize=8,
        )
        _label(below)
    panels[0, 0].set_ylabel("efficiency, %")
    panels[0, 0].set_ylim(0, 105)
    panels[1, 0].set_ylabel("exposed, ms a step")
    figure.align_ylabels()
    figure.suptitle(title, fontsize=8)
    figure.legend(loc="outside lower center", ncols=len(rates), frameon=False, handlelength=3.5)


def _look(number: int, algorithm: str) -> dict[str, Any]:
    color, _, marker = STYLES[number]
    face = color if algorithm == "ring" else "white"
    return {"color": color, "linestyle": DASHES[algorithm], "linewidth": 1.3, "marker": marker, "markersize": 3.5,
            "markerfacecolor": face}  # fmt: skip


def _label(below: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    below.set_xscale("log", base=2)
    below.set_xticks(SIZES[::TICK])
    below.xaxis.set_major_formatter(plain)
    below.xaxis.set_minor_locator(NullLocator())
    below.set_yscale("log")
    values: list[Any] = [line.get_ydata() for line in below.lines]
    low, high = min(map(min, values), default=1.0), max(map(max, values), default=1.0)
    below.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < WIDE * low else (1,)))
    below.yaxis.set_major_formatter(plain)
    below.yaxis.set_minor_locator(NullLocator())
    below.set_xlabel("ranks")
