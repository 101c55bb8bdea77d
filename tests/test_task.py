"""--task: a loss and figures of the user's own, over targets of any form; what is none is refused before it trains."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import own_tasks
import pytest
import torch
from launchers import Result, command, run
from rundir import newest, rows, summary
from test_bad_input import refused

from hvd_ddp.config import TrainConfig
from hvd_ddp.data.datasets import load
from hvd_ddp.data.feed import Place, Rank, feed
from hvd_ddp.data.loader import blank
from hvd_ddp.tasks import Checked, Classification

Cli = Callable[..., Result]
HERE = Path(__file__).parent
PATHS = f"{HERE.parent}:{HERE}"
SQUARES = ["--task", "own_tasks:Segmentation", "--model", "own_tasks:Pixels"]
pytestmark = pytest.mark.timeout(300)


def hvd_ddp(name: str, num_ranks: int, cwd: Path, *arguments: str) -> Result:
    return run(command("--nproc" if num_ranks > 1 else "python", num_ranks, ["-m", "hvd_ddp", name, *arguments]),
               cwd=cwd, PYTHONPATH=PATHS, timeout=200)  # fmt: skip


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on masks, of two ranks."""
    folder = tmp_path_factory.mktemp("squares")
    options = ["--data", "own_tasks:masks", *SQUARES, "--threads", "1", "--lr", "0.02", "--epochs", "12"]
    options += ["--workers", "1", "--run-dir", "run"]  # workers: for the data that evaluate reads item by item
    result = hvd_ddp("train", 2, folder, *options)
    assert result.code == 0, result.text[-3000:]
    return folder / "run"


def test_masks_are_learned(squares: Path) -> None:
    """A seventh of the pixels are of a square: 0.86 is what one gets for nothing."""
    found = summary(squares)
    assert found["pixels"] > 0.97 and found["loss"] < 0.1 and "accuracy" not in found
    evaluations = rows(squares, "eval")
    assert len(evaluations) == 12 and all(row["num_samples"] == 31 for row in evaluations)
    best = min(evaluations, key=lambda row: row["loss"])
    assert found["best"] == {"step": best["step"], "loss": best["loss"]}
    assert newest(squares)["config"]["task"] == "own_tasks:Segmentation"


def test_evaluate_and_predict_ask_the_task_of_the_training(
    squares: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    options = [str(squares), "--data", "own_tasks:masks_one_by_one", "--threads", "1"]
    wanted, result = summary(squares), cli("evaluate", "--json", *options)
    assert result.code == 0, result.text[-3000:]
    found = json.loads(result.out)
    assert found["num_samples"] == 31 and found["pixels"] == wanted["pixels"]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    result = hvd_ddp("predict", 2, tmp_path, *options)
    assert result.code == 0 and "predictions.csv: 31 samples\n" in result.out, result.text[-3000:]
    header, *lines = csv.reader((tmp_path / "predictions.csv").read_text().splitlines())
    assert header == ["sample", "loss"] and [int(line[0]) for line in lines] == list(range(31))
    assert sum(float(line[1]) for line in lines) / 31 == pytest.approx(wanted["loss"], rel=1e-4)
    result = cli("predict", *options, "--task", "own_tasks:WithPredict", "--output", str(tmp_path / "o.csv"))
    assert result.code == 0, result.text[-3000:]
    header, *lines = csv.reader((tmp_path / "o.csv").read_text().splitlines())
    assert header == ["sample", "name", "sum"] and {line[1] for line in lines} == {"sample of 9"}
    assert len({line[2] for line in lines}) == 31


def test_another_task_is_another_training(squares: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    options = ["--data", "own_tasks:masks", "--lr", "0.02", "--epochs", "20", "--run-dir", str(squares)]
    result = cli(*options, *SQUARES[2:], "--task", "own_tasks:WithPredict")
    refused(
        result, "was written with task `own_tasks:Segmentation`, this run has `own_tasks:WithPredict`", "--task own"
    )


@pytest.mark.timeout(500)
def test_parity_of_masks(tmp_path: Path) -> None:
    """The same bits under both backends on two ranks, and one process within 1e-12; each sample with its own mask."""
    options = ["--transport", "gloo", "--precision", "fp64", "--max-steps", "5", "--threads", "1", "--accumulate", "2"]
    result = run(
        command("python", 1, ["-m", "hvd_ddp", "parity", "--json", "--data",
                              "own_tasks:masks_one_by_one", *SQUARES, *options]),
        cwd=tmp_path, PYTHONPATH=PATHS, timeout=400,
    )  # fmt: skip
    assert result.code == 0, result.text[-3000:]
    found = {row["backend"]: row for row in json.loads(result.out)["rows"]}
    assert set(found) == {"ddp", "horovod", "local"} and all(row["same_samples"] for row in found.values())
    assert found["horovod"]["max_weight_difference"] == 0 < found["local"]["max_weight_difference"] <= 1e-12


def test_targets_that_are_numbers(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the dtype of training; nobody asks for classes, and the model's factory is told that there are none."""
    monkeypatch.syspath_prepend(str(HERE))
    options = ["--data", "own_tasks:numbers", "--model", "own_tasks:Line", "--task", "own_tasks:Regression"]
    options += ["--precision", "fp64", "--lr", "0.1", "--epochs", "60", "--threads", "1"]
    options += ["--eval-every", "60", "--run-dir", str(tmp_path / "r")]
    result = cli(*options)
    assert result.code == 0, result.text[-3000:]
    assert summary(tmp_path / "r")["loss"] < 1e-2
    assert (
        "12 + 12 samples of 1x8x8, targets that are no classes"
        in cli("data", "prepare", "own_tasks:masks_without_number").out
    )


def test_dry_run_asks_the_task(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    options = ["--data", "own_tasks:masks", *SQUARES, "--threads", "1", "--dry-run"]
    assert "dry run: 2 steps done" in cli(*options).out
    refused(cli("--task", "own_tasks:WithoutLoss", "--threads", "1", "--dry-run"), "without `loss`")


BAD = {
    "nowhere:Task": "--task `nowhere:Task` can't be loaded",
    "own_tasks:Nothing": "--task `own_tasks:Nothing` can't be loaded",
    "own_tasks:HERE": "can't be loaded",
    "clasification": "Did you mean `classification`?",
    "own_tasks:NeedsWords": "can't be called without an argument",
    "own_tasks:WithoutEvaluate": "made a `WithoutEvaluate` without `evaluate`",
    "own_tasks:Mean": "`Mean.losses` returned torch.float32 `()` for 2 samples",
    "own_tasks:Whole": "`Whole.losses` returned torch.int64 `(2,)`",
    "own_tasks:Number": "`Number.losses` returned a `list`",
    "own_tasks:Detached": "from which no gradient flows",
    "own_tasks:WithoutLoss": "`WithoutLoss.evaluate` returned `accuracy`, without `loss`",
    "own_tasks:NoDict": "`NoDict.evaluate` returned a `Tensor`, without `loss`",
    "own_tasks:NoScalar": "returned torch.float32 `(2,)` as `loss`, not a number",
    "own_tasks:Taken": "returned `step`, which means something else",
}


@pytest.mark.parametrize("task", BAD)
def test_a_task_that_is_none(task: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    run_dir = tmp_path / "none"
    refused(cli("--task", task, "--max-steps", "1", "--threads", "1", "--run-dir", str(run_dir)), BAD[task])
    assert not run_dir.exists()


def test_a_task_that_is_wrong_later(tmp_path: Path) -> None:
    """In the first step, told once for all ranks, without a traceback."""
    result = hvd_ddp("train", 2, tmp_path, "--task", "own_tasks:LaterWrong", "--threads", "1")
    assert result.code == 2 and "Traceback" not in result.err, result.text
    assert result.err.count("`LaterWrong.losses` returned torch.float32 `()` for 32 samples") == 1, result.err


REFUSED = {
    "masks without a task": (["--model", "own_tasks:Pixels"], "the shape `(8, 8)` a sample, and classification wants"),
    "masks that would not be cropped": ([*SQUARES, "--augment", "standard"], "images would be cropped and flipped"),
    "smoothing": ([*SQUARES, "--label-smoothing", "0.1"], "--label-smoothing is of classification"),
    "no classes": (
        ["--data", "own_tasks:masks_without_number", *SQUARES[:2]],
        "--model convnet has an output for each class, and how many there are this data does not say",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together(case: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    options, words = REFUSED[case]
    data = [] if "--data" in options else ["--data", "own_tasks:masks"]
    refused(cli(*data, *options, "--threads", "1", "--run-dir", str(tmp_path / "none")), words, box=case == "smoothing")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("data", "rows"), [("masks", "masks_one_by_one"), ("numbers", "numbers")])
def test_targets_come_with_their_samples(
    data: str, rows: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the epoch over any number of ranks, from memory as item by item; cut into micro-batches."""
    monkeypatch.syspath_prepend(str(HERE))
    config = TrainConfig(global_batch=25, accumulate=2)
    here = {"device": torch.device("cpu"), "dtype": dtype, "agree": lambda counts: counts}

    def seen(name: str, world_size: int) -> list[list[torch.Tensor]]:
        found = []
        ranks = [
            list(feed(config, load(f"own_tasks:{name}"), Rank(rank, world_size, 1), **here).steps(Place(), 7))
            for rank in range(world_size)
        ]
        for steps in zip(*ranks, strict=True):
            micros = [micro for step in steps for micro in step.micros]
            found.append([torch.cat([micro[part][: micro.num_samples] for micro in micros]) for part in (0, 1)])
        return found

    train = getattr(own_tasks, data)(None)[0]
    wanted = seen(data, 1)
    targets = train.tensors[1]
    kind = torch.int64 if targets.dtype == torch.int64 else dtype
    assert all(step[1].dtype == kind and step[1].shape[1:] == targets.shape[1:] for step in wanted)
    epoch = torch.cat([step[1] for step in wanted])[: len(train)]
    assert sorted(epoch.flatten(1).tolist() if epoch.ndim > 1 else epoch.tolist()) == sorted(
        targets.to(kind).flatten(1).tolist() if targets.ndim > 1 else targets.to(kind).tolist()
    ), "each once"
    for name, world_size in ((data, 3), (rows, 1), (rows, 2)):
        for mine, step in zip(seen(name, world_size), wanted, strict=True):
            assert torch.equal(mine[0], step[0]) and torch.equal(mine[1], step[1])


def test_a_stand_in_has_the_form_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    data = load("own_tasks:masks_one_by_one")
    config = TrainConfig(global_batch=2)
    steps = feed(
        config, data, Rank(2, 3, 1), device=torch.device("cpu"), dtype=torch.float64, agree=lambda counts: counts
    ).steps(Place(), 1)
    (micro,) = next(iter(steps)).micros
    assert micro.num_samples == 0
    form = blank(data.train, 1, device=torch.device("cpu"), dtype=torch.float64)
    for mine, wanted in ((micro.inputs, form.inputs), (micro.targets, form.targets)):
        assert (mine.dtype, mine.shape) == (wanted.dtype, wanted.shape)
    assert micro.targets.shape == (1, 8, 8) and micro.targets.dtype == torch.int64
    assert micro.inputs.shape == (1, 1, 8, 8) and micro.inputs.dtype == torch.float64


def test_the_built_in_task_is_not_tried_out() -> None:
    """It is right, and models may count their forwards."""

    def never(*_: object) -> None:
        raise AssertionError

    Checked(Classification()).try_out(never, None)  # type: ignore[arg-type]
