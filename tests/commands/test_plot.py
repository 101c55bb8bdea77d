"""plot: the picture shows what metrics.jsonl says, of any run that train may have left, and of nothing else."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launchers import Result, environment
from matplotlib.figure import Figure
from PIL import Image

from hvd_ddp.commands.plot import MOST_POINTS, STYLES, draw, means, points
from hvd_ddp.history import names, read

Cli = Callable[..., Result]


def start(**facts: Any) -> dict[str, Any]:
    return {"kind": "start", "restart": 0, "backend": "ddp", "transport": "gloo", "world_size": 2, **facts}


def train(step: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "step": step,
        "epoch": (step - 1) // 50,
        "loss": 2 / step,
        "samples_per_second": 400 + step,
    } | more


def evaluated(step: int, **more: Any) -> dict[str, Any]:
    return {
        "kind": "eval",
        "step": step,
        "epoch": (step - 1) // 50,
        "loss": 0.5,
        "accuracy": 0.9,
        "num_samples": 8,
    } | more


def write(folder: Path, *rows: dict[str, Any], options: str = "seed: 0\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(options)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def drawn(*folders: Path, against: str = "steps") -> Figure:
    figure = Figure()
    draw(figure, [read(folder) for folder in folders], against)
    return figure


def curves(figure: Figure, label: str) -> list[tuple[list[float], list[float]]]:
    """(x, y) of every line of the panel with this label, without those that are no more than legends."""
    (panel,) = [axes for axes in figure.axes if axes.get_ylabel() == label]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_two_real_runs(cli: Cli, tmp_path: Path) -> None:
    """One of which was told to stop, and went on on its own."""
    for name, options in (("a", []), ("b", ["--lr", "0.01", "--max-steps", "30"]), ("b", ["--lr", "0.01"])):
        result = cli("train", "--threads", "1", "--epochs", "2", "--run-dir", name, *options)
        assert result.code == 0, result.text
    for output in ("curves.png", "curves.svg", "curves.pdf"):
        result = cli("plot", "a", "b", "--output", output)
        assert (result.code, result.out) == (0, f"{output}\n"), result.text
        once = Path(output).read_bytes()
        assert cli("plot", "a", "b", "--output", output).code == 0
        assert Path(output).read_bytes() == once, "the same runs give the same bytes"
    with Image.open("curves.png") as image:
        assert image.width > 1200 and image.height < 0.7 * image.width
        assert len(image.convert("L").getcolors() or []) > 20, "not blank"
    figure = drawn(Path("a"), Path("b"))
    assert legend(figure) == ["lr 0.001", "lr 0.01"]
    steps = [step for step, _ in zip(*curves(figure, "loss")[2], strict=True)]
    assert steps == [10, 20, 30, 40, 46], "of b, across its restart"
    assert curves(figure, "accuracy")[0][0] == [23, 46]
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["a", "b", "curves.pdf", "curves.png", "curves.svg"]


def test_axes_say_what_and_in_which_unit(tmp_path: Path) -> None:
    run = write(
        tmp_path / "run", start(), *map(train, range(10, 200, 10)), evaluated(50), evaluated(100, accuracy=0.95)
    )
    figure = drawn(run)
    assert {axes.get_xlabel() for axes in figure.axes} == {"optimizer steps"}
    assert {axes.get_ylabel() for axes in figure.axes} == {"loss", "accuracy", "samples per second"}
    assert legend(figure) == ["ddp, 2 ranks"]
    training, evaluation = curves(figure, "loss")
    assert training == (list(range(10, 200, 10)), [2 / step for step in range(10, 200, 10)])
    assert evaluation == ([50, 100], [0.5, 0.5])
    assert curves(figure, "accuracy") == [([50, 100], [0.9, 0.95])]
    assert curves(figure, "samples per second") == [(training[0], [400 + step for step in training[0]])]
    (throughput,) = [axes for axes in figure.axes if axes.get_ylabel() == "samples per second"]
    assert throughput.get_ylim()[0] == 0
    over_epochs = drawn(run, against="epochs")
    assert {axes.get_xlabel() for axes in over_epochs.axes} == {"epochs"}
    assert curves(over_epochs, "accuracy")[0][0] == [1, 2]


def test_what_a_resume_went_back_behind_is_left_out(tmp_path: Path) -> None:
    """Also where the lines of both lives are at other steps."""
    first = [start(), train(10), train(20, loss=7.0), train(30, loss=8.0), evaluated(30, accuracy=0.1)]
    second = [start(restart=1, world_size=4), {"kind": "resume", "step": 15, "epoch": 0}, train(22), train(29)]
    figure = drawn(write(tmp_path / "run", *first, *second))
    assert curves(figure, "loss")[0] == ([10, 22, 29], [2 / 10, 2 / 22, 2 / 29])
    assert "accuracy" not in {axes.get_ylabel() for axes in figure.axes}
    assert legend(figure) == ["ddp, 4 ranks"]


def test_a_run_that_goes_on_or_was_cut(tmp_path: Path) -> None:
    run = write(tmp_path / "run", start(), train(10), train(20, loss=None, grad_norm=None), train(30))
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text + '{"kind": "tra\n[1]\n{"step": 31}\n{"kind": "train", "step": 40, "lo')
    (run / "config.yaml").unlink()
    steps, losses = curves(drawn(run), "loss")[0]
    assert steps == [10, 20, 30]
    assert math.isnan(losses[1]) and losses[0] == 0.2, "a gap where the loss was not finite"


def test_many_points_are_drawn_as_means(tmp_path: Path) -> None:
    rows = [
        {"step": step, "loss": float(step % 2), "samples_per_second": 100 + 200 * (step % 2)} for step in range(1, 1001)
    ]
    steps, losses = means(points(rows, "loss"))
    assert len(steps) <= MOST_POINTS and steps[-1] == 1000
    assert losses[:3] == [4 / 7, 3 / 7, 4 / 7]
    speeds = means(points(rows, "samples_per_second"), rate=True)[1]
    assert speeds[0] == pytest.approx(7 / (4 / 300 + 3 / 100)), "samples over seconds"
    run = write(tmp_path / "run", start(), *({"kind": "train", "epoch": 0} | row for row in rows))
    labels = [text.get_text() for text in drawn(run).axes[0].get_legend().get_texts()]
    assert labels == ["training, means over 7 steps", "evaluation"]


@pytest.mark.parametrize(
    ("starts", "options", "wanted"),
    [
        ([{"backend": "ddp"}, {"backend": "horovod"}], ["", ""], ["ddp", "horovod"]),
        ([{"world_size": 1}, {"world_size": 4}], ["", ""], ["1 rank", "4 ranks"]),
        ([{}, {}], ["lr: 0.1", "lr: 0.2"], ["lr 0.1", "lr 0.2"]),
        ([{}, {"backend": "horovod"}], ["lr: 0.1", "lr: 0.2"], ["ddp, lr 0.1", "horovod, lr 0.2"]),
        ([{}, {"backend": "horovod", "transport": "mpi"}], ["log_every: 1", "log_every: 2"], ["ddp", "horovod"]),
        ([{"transport": "gloo"}, {"transport": "mpi"}], ["", ""], ["gloo", "mpi"]),
        ([{}, {}], ["log_every: 1", "log_every: 2"], ["log-every 1", "log-every 2"]),
        ([{}, {}], ["{lr: 1, seed: 1, clip_norm: 1, model: a}", "{lr: 2, seed: 2}"], ["run0", "run1"]),
        ([{}, {}], ["run_dir: x", "run_dir: y"], ["run0", "run1"]),
        ([{}, {}], ["- no", "options: ["], ["run0", "run1"]),
    ],
    ids=["backend", "ranks", "an option", "two", "what follows is left out", "transport",
         "log-every", "too many", "nothing", "broken config"],
)  # fmt: skip
def test_runs_are_named_by_what_differs(
    starts: list[dict[str, Any]], options: list[str], wanted: list[str], tmp_path: Path
) -> None:
    folders = [
        write(tmp_path / f"run{number}", start(**facts), train(10), options=text)
        for number, (facts, text) in enumerate(zip(starts, options, strict=True))
    ]
    assert names([read(folder) for folder in folders]) == wanted


def test_directories_of_one_name(tmp_path: Path) -> None:
    folders = [write(tmp_path / name / "run", start(), train(10)) for name in ("_$a", "_b$")]
    assert legend(drawn(*folders)) == ["_$a/run", "_b$/run"]


def test_eight_runs_look_different_in_grey() -> None:
    assert len({(str(dashes), marker) for _, dashes, marker in STYLES}) == len(STYLES) == 8
    assert len({marker for _, _, marker in STYLES}) == 8


def test_neither_a_display_nor_the_users_style(tmp_path: Path) -> None:
    """No pyplot, which would choose a display; a matplotlibrc that can't be drawn with."""
    run = write(tmp_path / "run", start(), train(10), evaluated(10))
    (tmp_path / "matplotlibrc").write_text("backend: TkAgg\ntext.usetex: True\nfont.size: 40\n")
    code = (
        "import sys\nfrom hvd_ddp.main import main\n"
        f"assert main(['plot', {str(run)!r}, '--output', sys.argv[1]]) == 0\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    for name, env in (
        ("own.svg", {}),
        ("theirs.svg", {"MATPLOTLIBRC": str(tmp_path / "matplotlibrc"), "DISPLAY": ":9"}),
    ):
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        subprocess.run(command, env=environment(**env), check=True, timeout=60)
    assert (tmp_path / "own.svg").read_bytes() == (tmp_path / "theirs.svg").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["gone"], "`gone` is no directory: it is no run."),
        (["run/metrics.jsonl"], "`run/metrics.jsonl` is no directory"),
        (["foreign"], "`foreign` has no metrics.jsonl"),
        (["binary"], "`binary/metrics.jsonl` has no line that train wrote"),
        (["empty"], "`empty/metrics.jsonl` tells of no step yet"),
        (["started"], "`started/metrics.jsonl` tells of no step yet"),
        (["folder"], "`folder/metrics.jsonl` can't be read: Is a directory"),
        ([], "There are `0` runs. Give from 1 to 8"),
        (["run"] * 9, "There are `9` runs. Give from 1 to 8"),
        (["run", "--output", "curves.jpg"], "--output is `curves.jpg`. Give a name that ends with .png, .svg, .pdf."),
        (["run", "--output", "none/curves.png"], "`none/curves.png` can't be written: No such file or directory"),
        (["run", "--output", "folder.png"], "`folder.png` can't be replaced: Is a directory"),
        (["run", "--output", "letter.png"], "`letter.png` is there and is no .png picture: it is not replaced"),
        (["run", "--output", "letter.svg"], "`letter.svg` is there and is no .svg picture: it is not replaced"),
        (["run", "--against", "epochs"], "`run` has not ended an epoch yet. Wait for it, or use --against steps."),
        (["run", "--against", "hours"], "hours"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input(arguments: list[str], wanted: str, cli: Cli) -> None:
    write(Path("run"), start(), train(10))
    write(Path("started"), start())
    for name in ("foreign", "binary", "empty", "folder/metrics.jsonl", "folder.png"):
        Path(name).mkdir(parents=True)
    Path("binary/metrics.jsonl").write_bytes(bytes(range(256)))
    Path("empty/metrics.jsonl").touch()
    for name in ("letter.png", "letter.svg"):
        Path(name).write_text("Dear all")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    result = cli("plot", *arguments)
    said = " ".join(result.err.replace("│", " ").split())
    assert result.code == 2 and wanted in said and "Traceback" not in said, result.text
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
