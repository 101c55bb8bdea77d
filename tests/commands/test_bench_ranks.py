"""bench comm and bench step: what they print, with ranks of each kind, and that a pair does the same work."""

import json
import math
import statistics
from pathlib import Path

import pytest
from launchers import Result, assert_none_left, command, run
from rundir import rows
from torch import nn

from hvd_ddp import trainer
from hvd_ddp.backends import connect
from hvd_ddp.commands import bench_bare, bench_turn
from hvd_ddp.commands.bench import ratio
from hvd_ddp.config import TrainConfig
from hvd_ddp.data.datasets import load, prepare
from hvd_ddp.job.line import Line

SMALL = ["--min-bytes", "1024", "--max-bytes", "20000", "--repeats", "3"]
SHORT = ["--steps", "3", "--repeats", "2", "--model", "factories:Small", "--global-batch", "32"]


def bench(*arguments: str, launcher: str = "python", cwd: Path, code: int = 0) -> Result:
    program = ["-m", "hvd_ddp", "bench", *arguments]
    paths = f"{Path(__file__).parents[2]}:{Path(__file__).parents[1]}"
    result = run(command(launcher, 1 if launcher == "python" else 2, program), timeout=150, cwd=cwd, PYTHONPATH=paths)
    assert result.code == code, result.text[-4000:]
    assert_none_left(str(cwd))
    return result


@pytest.mark.parametrize(
    ("launcher", "wanted"),
    [
        ("python", ["ddp gloo", "ddp mpi", "horovod mpi", "mpi4py mpi"]),  # its ranks are those of mpirun
        ("torchrun", ["ddp gloo", "horovod gloo"]),
    ],
)
def test_comm_as_json(launcher: str, wanted: list[str], tmp_path: Path) -> None:
    said = json.loads(bench("comm", "--json", *SMALL, launcher=launcher, cwd=tmp_path).out)["rows"]
    assert [f"{row['backend']} {row['transport']}" for row in said[::3]] == wanted
    assert [row["bytes"] for row in said] == [1024, 4096, 16384] * len(wanted)
    for row in said:
        assert len(row["repeats"]) == 3 and min(row["repeats"]) > 0
        assert row["seconds"] == statistics.median(row["repeats"])
        assert row["bus_bandwidth"] == pytest.approx(row["bytes"] / row["seconds"])  # 2 (n - 1) / n is 1


def test_comm_as_a_table(tmp_path: Path) -> None:
    table = bench("comm", *SMALL, cwd=tmp_path).out
    for word in ("all_reduce over 2 ranks", "ddp gloo", "mpi4py mpi", "16,384"):
        assert word in table


def test_step_as_json(tmp_path: Path) -> None:
    said = json.loads(bench("step", "--json", "--every-transport", *SHORT, cwd=tmp_path).out)
    names = ["ddp mpi", "horovod mpi", "ddp gloo"]
    assert [row["name"] for row in said["rows"]] == [who + name for name in names for who in ("hvd_ddp, ", "bare ")]
    for row in said["rows"]:
        assert len(row["repeats"]) == 2 and min(row["repeats"]) > 0
        assert row["steps_per_second"] == statistics.median(row["repeats"])
    for name, ours, bare in (("ddp", *said["rows"][:2]), ("horovod", *said["rows"][2:4])):
        first, second = (a / b for a, b in zip(ours["repeats"], bare["repeats"], strict=True))
        assert said[f"ratio_to_bare_{name}"] == pytest.approx(math.sqrt(first * second))
        low, high = said[f"ratio_to_bare_{name}_interval"]
        assert low < said[f"ratio_to_bare_{name}"] < high
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "runs"]), "left behind"


def test_step_as_a_table(tmp_path: Path) -> None:
    result = bench("step", *SHORT, "--transport", "gloo", launcher="torchrun", cwd=tmp_path)
    for word in (
        "hvd_ddp, ddp gloo",
        "bare horovod gloo",
        "ddp gloo to bare ddp gloo: ",
        "95 % of paired turns",
    ):
        assert word in " ".join(result.out.split())


def test_what_guarding_costs(tmp_path: Path) -> None:
    said = json.loads(bench("step", "--json", "--guards", "--transport", "gloo", *SHORT, cwd=tmp_path).out)
    repeats = {row["name"]: row["repeats"] for row in said["rows"]}
    names = [who + name for name in ("ddp gloo", "horovod gloo") for who in ("guarded ", "unguarded ")]
    assert list(repeats) == names
    (a, b), (c, d) = repeats[names[0]], repeats[names[1]]
    assert said["ratio_to_unguarded_ddp"] == pytest.approx(math.sqrt(a * b / c / d))
    assert said["ratio_to_unguarded_horovod_interval"][0] < said["ratio_to_unguarded_horovod"]


def test_turns_with_guards_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last of four save and check their replicas; in the two between the line is silent."""
    checked: list[int] = []
    beating: list[bool] = []
    monkeypatch.setattr(trainer, "check_replicas", lambda *_, step, **__: checked.append(step))
    monkeypatch.setattr(trainer, "learning_rate", lambda *_, **__: beating.append(line.on_beat is beat) or 0.1)
    config = TrainConfig(run_dir=tmp_path / "run", check_replicas=3)
    line = Line(0, {})
    line.on_beat = beat = lambda: None
    with connect("ddp", "gloo", "cpu", threads=1, directory=tmp_path) as backend:
        turn = bench_turn.Turn(config, load("digits"), backend, line, steps=6)
        guarded, unguarded = turn.guards(2)
    assert len(guarded) == len(unguarded) == 2 and min(guarded + unguarded) > 0
    # 20 steps to warm up, then 6 on, 12 off, 6 on; a save is checked before, and there is one at the end.
    assert [row["step"] for row in rows(tmp_path / "run", "save")] == [23, 41, 45]
    assert checked == [3, 6, 9, 12, 15, 18, 21, 23, 24, 39, 41, 42, 45, 45]
    assert line.on_beat is beat
    # The rate of a step is asked for before its forward, which switches.
    assert beating[1:] == [True] * 26 + [False] * 12 + [True] * 6


@pytest.mark.parametrize("steps", [6, 49, 100, 130, 150, 1000])
def test_the_blocks_of_guarded_steps(steps: int) -> None:
    """A pair has as many with as without, and one save, in a guarded step."""
    blocks = bench_turn.Blocks(steps)
    for pair in range(3):
        numbers = range(2 * steps * pair, 2 * steps * (pair + 1))
        assert sum(map(blocks.on, numbers)) == pytest.approx(steps, abs=1)
        [saved] = filter(blocks.saves, numbers)
        assert blocks.on(saved) and blocks.on(saved + 1) and blocks.on(saved + steps // max(1, steps // 50) // 2 - 1)


def test_speeds_where_the_steps_do_not_divide() -> None:
    """A pair of 171 has a guarded step more or less than the other kind: all take 1 s."""
    guarded, unguarded = bench_turn.Blocks(171).speeds([float(step) for step in range(4 * 171 + 1)], 2)
    assert guarded + unguarded == pytest.approx([1.0] * 4)


def test_speeds_with_guards_and_without() -> None:
    """A guarded step takes 2 s, and each of them by and by 0.1 s more: the drift is no difference."""
    blocks, times = bench_turn.Blocks(200), [0.0]
    for step in range(800):
        times.append(times[-1] + (2.0 if blocks.on(step) else 1.0) + 0.1 * step)
    guarded, unguarded = blocks.speeds(times, 2)
    assert [1 / a - 1 / b for a, b in zip(guarded, unguarded, strict=True)] == pytest.approx([1.0, 1.0])


def test_step_with_a_compression_that_one_backend_has_not(tmp_path: Path) -> None:
    result = bench("step", *SHORT, "--transport", "gloo", "--compression", "bf16", launcher="torchrun", cwd=tmp_path)
    assert "hvd_ddp, ddp gloo" in result.out and "horovod" not in result.out


def test_step_under_one_backend(tmp_path: Path) -> None:
    said = json.loads(bench("step", "--json", "--backend", "horovod", *SHORT, cwd=tmp_path).out)
    assert [row["name"] for row in said["rows"]] == ["hvd_ddp, horovod mpi", "bare horovod mpi"]
    assert said["ratio_to_bare_ddp"] is None and said["ratio_to_bare_horovod"] > 0


def test_step_under_one_that_can_not(tmp_path: Path) -> None:
    result = bench("step", *SHORT, "--backend", "horovod", "--compression", "bf16", cwd=tmp_path, code=2)
    assert "Horovod sums no bfloat16" in result.err and "Traceback" not in result.err


def test_packed_data_is_data_in_memory(tmp_path: Path) -> None:
    """As the trainer is shown it, images of 28x28; few are evaluated."""
    name = "synthetic:1x28x28:10:1000"
    prepare(name, tmp_path)
    data = bench_turn.few_to_evaluate(load(name, tmp_path))
    inputs, targets = bench_turn.numbers(data)
    assert inputs.shape == (1000, 1, 28, 28) and targets.shape == (1000,) and len(data.eval) == 64
    assert abs(float(inputs.mean())) < 1e-3 and float(inputs.std()) == pytest.approx(1, abs=1e-3)


def test_the_interval() -> None:
    """Of ratios 1.1, 1.0 and 1.21: the logarithms' mean is that of 1.1, their deviation log 1.1, t is 4.303."""
    found, (low, high) = ratio([11.0, 10.0, 12.1], [10.0, 10.0, 10.0])
    assert found == pytest.approx(1.1)
    assert high / found == pytest.approx(1.1 ** (4.303 / math.sqrt(3))) and low * high == pytest.approx(found**2)


def test_a_pair_does_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[nn.Module] = []
    original = bench_turn.load_model

    def recording(*arguments: object) -> nn.Module:
        models.append(original(*arguments))
        return models[-1]

    monkeypatch.setattr(bench_turn, "load_model", recording)
    config = TrainConfig(run_dir=tmp_path / "run", optimizer="sgd", lr=0.05)
    with connect("ddp", "gloo", "cpu", threads=1, directory=tmp_path) as backend:
        turn = bench_turn.Turn(config, load("digits"), backend, Line(0, {}), steps=4)
        speeds = [turn.ours(), turn.bare(bench_bare.ddp)]
        first = original(config, load("digits"), backend).state_dict()
    assert min(speeds) > 0
    ours, bare = (model.state_dict() for model in models)
    for name in first:
        moved = (ours[name] - first[name]).norm()
        assert moved > 0
        assert (ours[name] - bare[name]).norm() < 1e-4 * moved, name
