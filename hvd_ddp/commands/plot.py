"""plot: learning and throughput curves of runs, as a picture for a paper."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from hvd_ddp.commands.options import command_line
from hvd_ddp.durable import replace_file
from hvd_ddp.errors import FINISHED, HvdDDPError
from hvd_ddp.history import History, Row, names, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIGNATURES = {".png": (b"\x89PNG",), ".svg": (b"<?xml", b"<svg"), ".pdf": (b"%PDF",)}
CENTIMETRE = 1 / 2.54  # inches
SIZE = (16.5 * CENTIMETRE, 10.5 * CENTIMETRE)  # the width of a text on A4, less than half of its height
MOST_POINTS = 150  # of a curve: more than that is a smear on a panel of this size
LONGEST = 95  # letters, of one line across the picture
SPREAD = 8  # largest loss over smallest, from which a linear axis shows little but the beginning

Points = tuple[list[float], list[float]]  # steps, values

# Colours of Okabe and Ito (jfly.uni-koeln.de/color), which the colour-blind tell apart; in grey dashes and markers do.
# The first is broad and the later ones leave gaps, so that runs with the same numbers are all seen.
STYLES: tuple[tuple[str, Any, str], ...] = (
    ("#0072B2", "-", "o"),
    ("#E69F00", (0, (4, 2)), "s"),
    ("#009E73", (0, (1, 1.2)), "^"),
    ("#CC79A7", (0, (6, 1.5, 1, 1.5)), "D"),
    ("#000000", (0, (8, 4)), "v"),
    ("#56B4E9", (0, (2, 3)), "P"),
    ("#D55E00", (0, (3, 1.5, 1, 1.5, 1, 1.5)), "X"),
    ("#7F7F7F", (0, (10, 2, 2, 2)), "*"),
)


@dataclass(frozen=True)
class Options:
    """Draw the learning and throughput curves of runs, also of one that still goes on.

    Training loss and throughput (evaluating and saving included) are means over the steps between two lines of
    metrics.jsonl, or over several such intervals where there are many. Where a run went back to a checkpoint, what came
    after that checkpoint the first time is left out.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories, up to 8. Each is named by what differs: backend, ranks, options, or else by its directory."""
    output: Path = Path("curves.png")
    """Picture to write: .png, .svg or .pdf, 16.5 cm wide. An older picture of that name is replaced."""
    against: Literal["steps", "epochs"] = "steps"
    """What the horizontal axes count."""

    def __post_init__(self) -> None:
        """Raise ValueError for what can't be drawn, whatever the runs are."""
        if not 1 <= len(self.runs) <= len(STYLES):
            raise ValueError(f"There are `{len(self.runs)}` runs. Give from 1 to {len(STYLES)}: more look alike.")
        if self.output.suffix.lower() not in SIGNATURES:
            raise ValueError(f"--output is `{self.output}`. Give a name that ends with {', '.join(SIGNATURES)}.")


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp plot`."""
    options = command_line(Options, arguments, "plot")
    refuse_to_replace(options.output)
    histories = [read(directory) for directory in dict.fromkeys(options.runs)]
    if options.against == "epochs":
        _refuse_without_epochs(histories)
    data = picture(histories, options.output.suffix.lower()[1:], options.against)
    try:
        replace_file(options.output, data)
    except OSError as error:
        raise HvdDDPError(f"`{options.output}` can't be written: {error.strerror}. Give another --output.") from error
    print(options.output)
    return FINISHED


def refuse_to_replace(path: Path) -> None:
    """Only what this program may have written is replaced: a picture of the same kind, or an empty file."""
    try:
        with path.open("rb") as file:
            start = file.read(256)
    except FileNotFoundError:
        return
    except OSError as error:
        raise HvdDDPError(f"`{path}` can't be replaced: {error.strerror}. Give another --output.") from error
    kind = path.suffix.lower()
    if start and not start.startswith(SIGNATURES[kind]):
        raise HvdDDPError(f"`{path}` is there and is no {kind} picture: it is not replaced. Give another --output.")


def _refuse_without_epochs(histories: list[History]) -> None:
    for history in histories:
        if history.steps_per_epoch is None:
            raise HvdDDPError(f"`{history.directory}` has not ended an epoch yet. Wait for it, or use --against steps.")


def picture(histories: list[History], kind: str, against: str = "steps") -> bytes:
    """A file of this kind: png, svg or pdf. The same runs give the same bytes."""
    return render(lambda figure: draw(figure, histories, against), kind)


def render(draw: Callable[[Figure], None], kind: str) -> bytes:
    """What `draw` draws as a file of this kind, in the style of this package."""
    import matplotlib
    from matplotlib import style
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    look: Any = {
        "font.size": 8,
        "axes.labelsize": 8.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#DDDDDD",
        "grid.linewidth": 0.6,
        "legend.fontsize": 8,
        "text.parse_math": False,  # a dollar in the name of a directory
        "svg.hashsalt": "hvd_ddp",
    }
    with style.context("default"), matplotlib.rc_context(look):  # whatever the user's own matplotlibrc says
        figure = Figure(figsize=SIZE, layout="constrained")
        draw(figure)
        file = io.BytesIO()
        undated: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(file, format=kind, dpi=200, metadata=undated[kind])
    return file.getvalue()


def draw(figure: Figure, histories: list[History], against: str) -> None:
    """Loss beside accuracy (or what else was evaluated first) and throughput; panels without a point are left out."""
    evaluated = [name for history in histories for row in history.evaluations for name in row if _is_result(name)]
    right = evaluated[:1] + (["throughput"] if any(history.train for history in histories) else [])
    axes = figure.subplot_mosaic([["loss", panel] for panel in right] or [["loss"]])  # type: ignore[arg-type]
    intervals: list[int] = []
    for number, history in enumerate(histories):
        unit = (history.steps_per_epoch or 1) if against == "epochs" else 1
        curve, points_only = line(number), {**marker(number), "linestyle": ""}
        both = {**line(number), **marker(number)}
        loss = means(points(history.train, "loss"))
        intervals += [round(after - before) for before, after in pairwise(loss[0])]
        _plot(axes["loss"], loss, unit, curve)
        _plot(axes["loss"], points(history.evaluations, "loss"), unit, points_only)
        for name in evaluated[:1]:
            _plot(axes[name], points(history.evaluations, name), unit, both)
        if "throughput" in axes:
            _plot(axes["throughput"], means(points(history.train, "samples_per_second"), rate=True), unit, curve)
    for name, panel in axes.items():
        _label(panel, name, "optimizer steps" if against == "steps" else "epochs")
    figure.align_ylabels()
    _explain(figure, axes["loss"], histories, intervals)


def _plot(panel: Axes, curve: Points, unit: float, look: dict[str, Any]) -> None:
    panel.plot([step / unit for step in curve[0]], curve[1], **look)


def _explain(figure: Figure, loss: Axes, histories: list[History], intervals: list[int]) -> None:
    """The legends: of the runs above all panels, of lines and markers in that of the loss."""
    from matplotlib.lines import Line2D

    grey: dict[str, Any] = {"color": "#555555", "linewidth": 1.4}
    kinds = [Line2D([], [], **grey), Line2D([], [], marker="o", linestyle="", markerfacecolor="white", **grey)]
    steps = statistics.mode(intervals or [1])
    loss.legend(kinds, ["training" + (f", means over {steps} steps" if steps > 1 else ""), "evaluation"], frameon=False)
    runs = [Line2D([], [], **{**line(number), **marker(number)}) for number in range(len(histories))]
    words = [name if len(name) <= LONGEST else f"...{name[-LONGEST:]}" for name in names(histories)]
    columns = max(1, min(4, LONGEST // (max(map(len, words)) + 9)))
    figure.legend(runs, words, loc="outside upper center", ncols=columns, frameon=False, handlelength=3.5)


def points(rows: list[Row], name: str) -> Points:
    """Every row that has this number; NaN, a gap in the curve, where it was not finite."""
    rows = [row for row in rows if name in row]
    values = (row[name] for row in rows)
    return [float(row["step"]) for row in rows], [
        float(value) if isinstance(value, int | float) else math.nan for value in values
    ]


def means(curve: Points, *, rate: bool = False) -> Points:
    """Means over several neighbours where there are very many points; of a rate: over the same work, not time."""
    x, y = curve
    size = math.ceil(len(x) / MOST_POINTS) or 1
    mean = statistics.harmonic_mean if rate and min(y, default=0) > 0 else statistics.fmean
    groups = [slice(start, start + size) for start in range(0, len(x), size)]
    return [x[group][-1] for group in groups], [mean(y[group]) for group in groups]


def _is_result(name: str) -> bool:
    return name not in ("kind", "step", "epoch", "loss", "num_samples")


def line(number: int) -> dict[str, Any]:
    """How the curve of that number looks."""
    color, dashes, _ = STYLES[number]
    return {"color": color, "linestyle": dashes, "linewidth": 1.3 if number else 2.4}


def marker(number: int) -> dict[str, Any]:
    """How its points look."""
    color, _, marker = STYLES[number]
    face, size = ("white", 4) if number else (color, 7)
    return {"color": color, "marker": marker, "markersize": size, "markerfacecolor": face}


def _label(panel: Axes, name: str, below: str) -> None:
    """Axes in words with units, from zero where zero means something; losses over decades on a logarithmic one."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    panel.set_xlabel(below)
    panel.set_xlim(left=0)
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=below != "epochs"))
    panel.xaxis.set_major_formatter(plain)
    panel.set_ylabel({"throughput": "samples per second"}.get(name, name.replace("_", " ")))
    if name == "throughput":
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter(plain)
    curves: list[Any] = [line.get_ydata() for line in panel.lines]
    values = [float(value) for curve in curves for value in curve if math.isfinite(value)]
    if name == "loss" and values and max(values) > SPREAD * min(values) > 0:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(plain)
        panel.yaxis.set_minor_formatter("")
