"""bench: what it prints, and that the rows do the same work."""

import json
import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch
from launchers import Result

from hvd_ddp.commands.bench_data import candidates

Cli = Callable[..., Result]
SHORT = ["bench", "data", "--seconds", "0.02", "--repeats", "3", "--batch", "16"]


def test_data_as_json(cli: Cli) -> None:
    threads = torch.get_num_threads()
    result = cli(*SHORT, "--json")
    assert result.code == 0, result.text
    rows = json.loads(result.out)["rows"]
    assert [row["name"] for row in rows] == ["hvd_ddp", "torchvision", "limit"]
    for row in rows:
        assert len(row["repeats"]) == 3 and min(row["repeats"]) > 0
        assert row["images_per_second"] == statistics.median(row["repeats"])
    assert torch.get_num_threads() == threads


def test_data_as_a_table(cli: Cli) -> None:
    result = cli(*SHORT)
    assert result.code == 0, result.text
    for word in ("images per second", "hvd_ddp", "torchvision", "limit"):
        assert word in result.out


def test_folder(cli: Cli) -> None:
    """Pictures that it makes itself, and leaves nothing of."""
    result = cli("bench", "folder", "--repeats", "2", "--batches", "1", "--batch", "4", "--workers", "1", "--json")
    assert result.code == 0, result.text
    rows = json.loads(result.out)["rows"]
    assert [row["name"] for row in rows] == ["hvd_ddp", "torchvision"]
    assert all(row["images_per_second"] > 0 and len(row["repeats"]) == 2 for row in rows)


def test_all_rows_make_the_same_kind_of_batch() -> None:
    made = {name: make(np.arange(200)) for name, make in candidates().items()}
    for batch in made.values():
        assert batch.dtype == torch.float32 and batch.shape == (200, 3, 32, 32)
    looks = torch.cat([made["hvd_ddp"], made["torchvision"]])
    black = looks.min()
    for name in ("hvd_ddp", "torchvision"):  # both padded, both normalised
        borders = made[name][:, :, 0]
        assert 0.3 < torch.isclose(borders, black, atol=0.02).all(dim=(1, 2)).float().mean() < 0.6
        assert made[name].std().item() == pytest.approx(1.1, abs=0.05)  # 1 but for the black borders


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (
            ["bench", "dat"],
            "`dat` is nothing that can be measured. Did you mean data? Use bench with one of: data, ",
        ),
        (["bench", "data", "--batch", "0"], "--batch is `0`"),
        (["bench", "data", "--repeats", "0"], "--repeats `0`"),
        (["bench", "data", "--seconds", "0"], "--seconds `0.0`"),
        (["bench", "folder", "--workers", "0"], "--workers `0`"),
        (["bench", "folder", "--data-dir", "nowhere"], "--data-dir is `nowhere`, which is no folder"),
        (["bench", "comm", "--min-bytes", "0"], "--min-bytes is `0`"),
        (["bench", "comm", "--nproc", "1"], "--nproc `1`"),
        (["bench", "step", "--repeats", "1"], "--repeats `1`"),
        (["bench", "start", "--repeats", "1"], "--repeats `1`"),
        (["bench", "peers", "--repeats", "1"], "--repeats `1`"),
        (["bench", "peers", "--global-batch", "63"], "--global-batch is `63` for 2 ranks"),
        (["benhc"], "Did you mean bench?"),
    ],
    ids=" ".join,
)
def test_bad_input(arguments: list[str], wanted: str, cli: Cli) -> None:
    result = cli(*arguments)
    assert result.code == 2 and wanted in " ".join(result.err.split()) and "Traceback" not in result.err


def test_which_there_are(cli: Cli) -> None:
    for arguments in (["bench"], ["bench", "--help"]):
        result = cli(*arguments)
        assert result.code == 0 and "NAME is one of: data" in result.out


@pytest.mark.full
def test_data_is_as_fast_as_promised(cli: Cli) -> None:
    """On a core that nothing else uses."""
    rows = {row["name"]: row["images_per_second"] for row in json.loads(cli("bench", "data", "--json").out)["rows"]}
    assert rows["hvd_ddp"] >= 100_000
    assert rows["hvd_ddp"] >= 15 * rows["torchvision"]
