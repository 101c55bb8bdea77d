"""scaling: what was measured is in the table, the CSV and the picture; what failed is named, and the rest is kept."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from launchers import ROOT, Result, assert_none_left, run
from launchers import command as under
from matplotlib.figure import Figure

from hvd_ddp.commands.scaling import sizes_up_to
from hvd_ddp.commands.scaling_plot import draw
from hvd_ddp.commands.scaling_table import Cell, as_csv, efficiencies
from hvd_ddp.commands.starters import Place, last_words, look
from hvd_ddp.job.launch import Launch

Cli = Callable[..., Result]
SHORT = ["--nproc", "2", "--steps", "10", "--model", "factories:Small", "--threads", "1"]
pytestmark = pytest.mark.timeout(500)


def scaling(*options: str, cwd: Path) -> Result:
    paths = f"{ROOT}:{ROOT / 'tests'}"
    program = under("python", 1, ["-m", "hvd_ddp", "scaling", *SHORT, *options])
    result = run(program, timeout=400, cwd=cwd, PYTHONPATH=paths)
    assert_none_left(str(cwd))
    assert "Traceback" not in result.err, result.text
    return result


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def test_weak_under_both_backends(tmp_path: Path) -> None:
    result = scaling("--mode", "weak", "--repeats", "1", "--json", "--global-batch", "32", cwd=tmp_path)
    assert result.code == 0, result.text
    rows = json.loads(result.out)["rows"]
    assert [(row["backend"], row["transport"], row["ranks"]) for row in rows] == [
        ("ddp", "mpi", 1), ("ddp", "mpi", 2), ("horovod", "mpi", 1), ("horovod", "mpi", 2)
    ]  # fmt: skip
    assert [row["global_batch"] for row in rows] == [32, 64, 32, 64]
    assert [row["efficiency"] for row in rows[::2]] == [1.0, 1.0]
    for row in rows:
        assert len(row["repeats"]) == 1 and min(row["repeats"]) > 0 and row["hosts"] == row["threads"] == 1
        assert row["samples_per_second"] == pytest.approx(row["repeats"][0])
    assert [float(row["samples_per_second"]) for row in table(tmp_path / "scaling.csv")] == pytest.approx(
        [row["samples_per_second"] for row in rows], rel=1e-5
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scaling.csv", "scaling.png", "scaling.svg"]
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert "efficiency" in (tmp_path / "scaling.svg").read_text()


def test_a_run_that_fails_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    options = ["--backend", "ddp", "--start-with", "nproc", "--global-batch", "1", "--repeats", "1"]
    result = scaling(*options, cwd=tmp_path)
    assert result.code == 1, result.text
    assert "ddp on 2 ranks failed after 0 repeats: --global-batch is `1`, for 2 ranks" in result.out
    alone, both = table(tmp_path / "scaling.csv")
    assert (alone["transport"], alone["ranks"], alone["efficiency"], alone["error"]) == ("gloo", "1", "1", "")
    assert float(alone["samples_per_second"]) > 0
    assert (both["ranks"], both["samples_per_second"], both["efficiency"], both["repeats"]) == ("2", "", "", "0")
    assert both["error"].startswith("--global-batch is `1`")
    assert (tmp_path / "scaling.png").exists()


def cell(backend: str, num_ranks: int, *speeds: float) -> Cell:
    facts = {"transport": "mpi", "hosts": ["a", "b"][:num_ranks], "threads": 1, "global_batch": 64}
    return Cell(backend, num_ranks, list(speeds), [] if speeds else ["it is on fire"], facts if speeds else {})


CELLS = [cell("ddp", 1, 90, 100, 120), cell("ddp", 2, 150), cell("ddp", 4, 320), cell("horovod", 1),
         cell("horovod", 2, 160), cell("horovod", 4, 240)]  # fmt: skip


def test_efficiency_is_to_the_fewest_ranks_that_were_measured() -> None:
    assert [share for _, share in efficiencies(CELLS)] == [1.0, 0.75, 0.8, None, 1.0, 0.75]


def test_csv() -> None:
    lines = as_csv(CELLS, "strong").splitlines()
    assert lines[0] == (
        "mode,backend,transport,ranks,hosts,threads,global_batch,samples_per_second,efficiency,lowest,highest,repeats,"
        "error"
    )
    assert lines[1] == "strong,ddp,mpi,1,1,1,64,100,1,90,120,3,"
    assert lines[4] == "strong,horovod,,1,,,,,,,,0,it is on fire"


def test_the_picture() -> None:
    figure = Figure()
    draw(figure, CELLS, "strong scaling: x")
    left, right = figure.axes
    curves = {tuple(line.get_xdata()): list(line.get_ydata()) for line in right.lines}
    assert curves[1, 2, 4] == [100.0, 100.0, 100.0], "the ideal is drawn last"
    assert curves[2, 4] == [100.0, 75.0]
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in left.lines]
    assert ([1, 2, 4], [100, 150, 320]) in drawn and ([1, 2, 4], [100, 200, 400]) in drawn
    assert ([2, 4], [160, 240]) in drawn and ([2, 4], [160, 320]) in drawn
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["ideal: in proportion to the fewest ranks", "ddp, mpi", "horovod, mpi"]


@pytest.mark.parametrize(("most", "wanted"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_sizes(most: int, wanted: list[int]) -> None:
    assert sizes_up_to(most) == wanted


@pytest.mark.parametrize(
    ("num_ranks", "wanted"),
    [(1, (1, 1, 1)), (3, (1, 3, 3)), (4, (1, 4, 4)), (5, (2, 5, 3)), (8, (2, 8, 4)), (12, (3, 12, 4))],
)
def test_srun_takes_as_few_nodes_as_can_be(num_ranks: int, wanted: tuple[int, int, int]) -> None:
    command = Place("srun", 16, 4, 4, options=("--kill-on-bad-exit=1",)).command(num_ranks, ["train"])
    nodes, tasks, each = wanted
    assert command[:5] == [
        "srun", f"--nodes={nodes}", f"--ntasks={tasks}", f"--ntasks-per-node={each}", "--kill-on-bad-exit=1"
    ]  # fmt: skip
    assert command[-1] == "train"


def test_a_hostfile_says_how_many_ranks_there_is_room_for(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=4\n\nb slots=2 max_slots=8\nc\n")
    place = look(Launch(cores=2), "auto", path)
    assert (place.start_with, place.num_ranks, place.ranks_a_node) == ("mpirun", 7, 4)
    assert place.command(3, ["train"])[1:7] == ["-np", "3", "--bind-to", "none", "--hostfile", str(path)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a warning\nhvd_ddp: rank 1 on node2 failed\n-----\nprterun detected a non-zero status\n-----\n",
         "rank 1 on node2 failed"),
        ("-----\nThere are not enough slots\n\nin the system.\n-----\n", "There are not enough slots in the system."),
        ("python: No module named x\n-----\nprterun detected a non-zero status\n", "python: No module named x"),
        ("Traceback (most recent call last):\n  here\nOSError: no\n", "OSError: no"),
        ("", "It ended with 7."),
    ],
)  # fmt: skip
def test_why_a_run_failed(text: str, wanted: str) -> None:
    assert last_words(text, 7) == wanted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--steps", "5"], "--steps is `5`"),
        (["--repeats", "0"], "--repeats `0`"),
        (["--backend", "local"], "--backend local is one process"),
        (["--start-with", "srun"], "srun starts ranks inside a Slurm allocation"),
        (["--start-with", "srun", "--hostfile", "x"], "--hostfile is for mpirun, --start-with is `srun`"),
        (["--hostfile", "nowhere"], "--hostfile `nowhere` can't be read"),
        (["--transport", "nccl", "--device", "cpu"], "Nothing to measure: --transport nccl moves tensors of GPUs"),
        (["--output", "nowhere/x"], "nowhere"),
    ],
    ids=" ".join,
)
def test_bad_input(options: list[str], wanted: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvd_ddp.commands.scaling._measure", lambda *_: None)
    result = cli("scaling", *options)
    assert result.code == 2 and wanted in " ".join(result.err.split()) and "Traceback" not in result.err, result.text


@pytest.mark.parametrize("name", ["scaling.csv", "scaling.png"])
def test_nobody_elses_file_is_replaced(name: str, cli: Cli) -> None:
    Path(name).write_text("mine\n")
    result = cli("scaling")
    assert result.code == 2 and f"`{name}` is there" in result.err
    assert Path(name).read_text() == "mine\n"


def test_several_tasks_are_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = json.loads((ROOT / "tests/environments/openmpi.json").read_text())["ranks"]
    for name, value in ranks[0].items():
        monkeypatch.setenv(name, value)
    result = cli("scaling")
    assert result.code == 2 and "scaling starts its own ranks, but openmpi started `2` of it" in result.err
