"""scaling: the picture, throughput beside efficiency."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvd_ddp.commands.plot import line, marker
from hvd_ddp.commands.scaling_table import Cell, efficiencies

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IDEAL: dict[str, Any] = {"color": "#555555", "linestyle": (0, (1, 1)), "linewidth": 1.1, "zorder": 1}


def draw(figure: Figure, cells: list[Cell], title: str) -> None:
    """A curve a backend, medians with the range of the repeats, and the ideal of each."""
    left, right = figure.subplots(1, 2)
    measured = [(cell, share) for cell, share in efficiencies(cells) if share is not None]
    sizes = sorted({cell.num_ranks for cell, _ in measured})
    for number, backend in enumerate(dict.fromkeys(cell.backend for cell, _ in measured)):
        own = [(cell, share) for cell, share in measured if cell.backend == backend]
        ranks, speeds = [cell.num_ranks for cell, _ in own], [cell.speed for cell, _ in own]
        look = {**line(number), **marker(number)}
        label = f"{backend}, {own[0][0].facts['transport']}"
        left.plot(ranks, [speeds[0] / ranks[0] * size for size in ranks], **IDEAL)
        left.errorbar(
            ranks, speeds, _ranges([cell for cell, _ in own]), capsize=2.5, elinewidth=1.2, label=label, **look
        )
        right.plot(ranks, [100 * share for _, share in own], **look)
    right.plot(sizes, [100.0] * len(sizes), **IDEAL)
    left.plot([], [], label="ideal: in proportion to the fewest ranks", **IDEAL)
    left.set_yscale("log", base=2)
    left.set_ylabel("samples per second")
    right.set_ylabel("efficiency, % of the ideal")
    right.set_ylim(0, max(110.0, *(110 * share for _, share in measured)))
    _label(left, sizes)
    _label(right, sizes)
    figure.suptitle(title, fontsize=8.5)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, handlelength=3.5)


def _ranges(cells: list[Cell]) -> list[list[float]]:
    """How far the lowest and the highest repeat are from the median."""
    return [[cell.speed - min(cell.speeds) for cell in cells], [max(cell.speeds) - cell.speed for cell in cells]]


def _label(panel: Axes, sizes: list[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    panel.set_xscale("log", base=2)
    if panel.get_yscale() == "log":
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        panel.yaxis.set_minor_locator(NullLocator())
    panel.set_xticks(sizes)
    panel.xaxis.set_major_formatter(plain)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(plain)
    panel.set_xlabel("ranks")
