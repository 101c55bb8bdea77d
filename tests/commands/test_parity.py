"""parity: equal where the backends compute the same, and where they do not, the step and what differs first."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launchers import Result, assert_none_left, command, run

from hvd_ddp.commands.parity_judge import Row, Trace, judge

Cli = Callable[..., Result]
PATHS = f"{Path(__file__).parents[2]}:{Path(__file__).parents[1]}"
GLOO = ["--max-steps", "6", "--precision", "fp64", "--transport", "gloo"]
pytestmark = pytest.mark.timeout(500)


def parity(*options: str, cwd: Path, launcher: str = "python", **env: str) -> Result:
    program = command(
        launcher, 1 if launcher == "python" else 2, ["-m", "hvd_ddp", "parity", "--threads", "1", *options]
    )
    result = run(program, timeout=400, cwd=cwd, PYTHONPATH=PATHS, **env)
    assert_none_left(str(cwd))
    assert "Traceback" not in result.err, result.text
    assert not list(cwd.iterdir()), "left behind"
    return result


def rows(result: Result) -> tuple[dict[tuple[str, str], dict[str, Any]], dict[str, Any]]:
    said = json.loads(result.out)
    return {(row["backend"], row["transport"]): row for row in said["rows"]}, said


def test_the_ways_over_gloo(tmp_path: Path) -> None:
    result = parity(*GLOO, "--accumulate", "2", "--json", cwd=tmp_path)
    assert result.code == 0, result.text
    found, said = rows(result)
    assert list(found) == [("ddp", "gloo"), ("horovod", "gloo"), ("local", "none")] and said["equal"] is True
    assert [row["judged"] for row in found.values()] == [False, True, True]
    assert found["horovod", "gloo"]["max_weight_difference"] == found["horovod", "gloo"]["max_loss_difference"] == 0
    assert 0 < found["local", "none"]["max_weight_difference"] <= 1e-12, "it sums in another order"


@pytest.mark.full
def test_all_that_is_here(tmp_path: Path) -> None:
    result = parity("--max-steps", "12", "--precision", "fp64", "--accumulate", "2", "--json", cwd=tmp_path)
    assert result.code == 0, result.text
    found, said = rows(result)
    assert list(found) == [("ddp", "gloo"), ("ddp", "mpi"), ("horovod", "gloo"), ("horovod", "mpi"), ("local", "none")]
    assert said["equal"] is True
    assert set(said["not_here"]) == {"ddp over nccl", "horovod over nccl"}
    alone = found.pop(("local", "none"))
    for row in found.values():
        assert (row["ranks"], row["max_weight_difference"], row["max_loss_difference"]) == (2, 0, 0)
    assert [row["judged"] for row in found.values()] == [False, True, True, True]
    assert 0 < alone["max_weight_difference"] <= 1e-12, "it sums in another order, so that what was compared is real"
    assert 0 < alone["max_loss_difference"] <= 1e-12
    assert alone["same_samples"] and alone["judged"] and alone["tolerance"] == 1e-12


def test_another_model_under_one_backend(tmp_path: Path) -> None:
    result = parity(*GLOO, "--model", "factories:OtherUnderHorovod", cwd=tmp_path)
    assert result.code == 1, result.text
    assert "horovod over gloo: differs first in step 4: loss by " in result.out
    assert "parameter `layer.weight` by " in result.out or "parameter `layer.bias` by " in result.out
    lines = result.out.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("horovod over gloo  ")] == ["DIFFERS"]
    assert [line.split()[-1] for line in lines if line.startswith("local  ")] == ["1e-12"], "judged all the same"


@pytest.mark.full
def test_a_backend_that_fails(tmp_path: Path) -> None:
    result = parity(*GLOO, "--model", "factories:OtherUnderHorovod", "--json", cwd=tmp_path, RAISE="1")
    assert result.code == 1, result.text
    found, said = rows(result)
    assert said["equal"] is False
    assert "failed in forward at step 3: RuntimeError: the sensor is on fire" in found["horovod", "gloo"]["error"]
    assert found["horovod", "gloo"]["max_weight_difference"] is None
    assert found["local", "none"]["judged"] and found["local", "none"]["error"] is None


@pytest.mark.full
def test_another_order_of_samples(tmp_path: Path) -> None:
    options = ["--data", "factories:other_order_under_horovod", "--model", "factories:Small", "--global-batch", "100"]
    result = parity(*GLOO, *options, "--json", cwd=tmp_path)
    assert result.code == 1, result.text
    found, _ = rows(result)
    assert found["horovod", "gloo"]["same_samples"] is False
    assert found["horovod", "gloo"]["first_difference"]["step"] == 1
    assert found["horovod", "gloo"]["first_difference"]["what"].startswith("other samples")
    assert found["local", "none"]["same_samples"] is True


@pytest.mark.full
def test_what_depends_on_shares_is_not_judged_by_one_process(tmp_path: Path) -> None:
    options = ["--max-steps", "4", "--transport", "gloo", "--model", "factories:Random", "--precision", "fp64"]
    result = parity(*options, cwd=tmp_path)
    assert result.code == 0, result.text
    assert (
        "local: not judged: it depends on how samples are shared out (random numbers, such as dropout's)" in result.out
    )
    assert "same bits" in result.out


@pytest.mark.full
def test_nothing_is_proved_where_nothing_has_to_agree(tmp_path: Path) -> None:
    result = parity("--max-steps", "2", "--transport", "gloo", "--backend", "ddp", cwd=tmp_path)
    assert result.code == 2, result.text
    assert "ddp over gloo is here, but nothing that would have to agree with it in fp32" in result.err
    assert "--precision fp64" in result.err


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--model", "nowhere:x"], "`nowhere:x` can't be loaded"),
        (["--global-batch", "1"], "some micro-batches would be empty"),
    ],
    ids=" ".join,
)
def test_what_the_first_way_is_refused(options: list[str], wanted: str, tmp_path: Path) -> None:
    result = parity(*options, cwd=tmp_path)
    assert result.code == 2 and wanted in result.err, result.text


def test_each_of_several_ranks_is_refused(tmp_path: Path) -> None:
    result = parity(launcher="mpirun", cwd=tmp_path)
    assert result.code == 2, result.text
    assert result.err.count("parity starts its own ranks, but openmpi started `2` of it") == 1


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--tolerance", "-1"], "--tolerance is `-1.0`"),
        (["--backend", "local"], "--backend local is one process, --nproc is `2`"),
        (["--transport", "nccl", "--device", "cpu"], "Nothing to compare: --transport nccl moves tensors of GPUs"),
        (["--max-stpes", "2"], "--max-steps"),
        (["--config", "nothing.yaml"], "`nothing.yaml`"),
    ],
    ids=" ".join,
)
def test_bad_input(options: list[str], wanted: str, cli: Cli) -> None:
    result = cli("parity", *options)
    assert result.code == 2 and wanted in " ".join(result.err.split()) and "Traceback" not in result.err, result.text


def test_help(cli: Cli) -> None:
    result = cli("parity", "--help")
    assert result.code == 0
    for word in ("--tolerance", "--global-batch", "norm(a - b) / norm(b)", "(default: 30)"):
        assert word in result.out


def trace(**changes: Any) -> Trace:
    values: dict[str, Any] = {
        "device": "cpu",
        "losses": {1: 2.0, 2: 1.0, 3: 0.5},
        "samples": {1: ["a", "b"], 2: ["c", "d"], 3: ["a", "c"]},
        "distances": {1: {}, 2: {}, 3: {}},
        "shares": [],
    }
    return Trace(**{**values, **changes})


FAR = {"parameter `a`": 1e-9, "parameter `b`": 1e-3, "buffer `c`": math.inf}


@pytest.mark.parametrize(
    ("limit", "changes", "wanted"),
    [
        (0.0, {}, None),
        (0.0, {"samples": {1: ["a", "b"], 2: ["d", "c"], 3: ["a", "c"]}}, (2, "other samples")),
        (0.0, {"losses": {1: 2.0, 2: 1.0, 3: 0.6}}, (3, "loss by 2.0e-01")),
        (0.0, {"losses": {1: 2.0, 2: 1.0, 3: math.nan}}, (3, "loss by inf")),
        (0.0, {"losses": {1: 2.0, 2: 1.0}}, (3, "loss by inf")),
        (0.5, {"losses": {1: 2.0, 2: 1.0, 3: 0.6}}, None),
        (0.0, {"distances": {1: {}, 2: FAR, 3: FAR}}, (2, "buffer `c` by inf and 2 more")),
        (1e-6, {"distances": {1: {"parameter `a`": 1e-9}, 2: {}, 3: FAR}}, (3, "buffer `c` by inf and 1 more")),
        (1e-12, {"distances": {1: {"parameter `a`": 1e-13}, 2: {}, 3: {}}}, None),
    ],
)
def test_what_differs_first(limit: float, changes: dict[str, Any], wanted: tuple[int, str] | None) -> None:
    row = judge(Row("x", "ddp", "mpi", 2), trace(**changes), trace(), limit, same_shares=True)
    assert row.first == wanted
    assert row.judged and row.equal == (wanted is None)


def test_the_largest_differences() -> None:
    far = trace(distances={1: {"parameter `a`": 1e-9}, 2: {"parameter `a`": 1e-7, "buffer `c`": 1e-8}, 3: {}})
    row = judge(Row("x", "ddp", "mpi", 2), far, trace(), None, same_shares=True)
    assert (row.weights, row.buffers, row.loss, row.judged, row.equal) == (1e-7, 1e-8, 0.0, False, True)
    assert "--precision fp64" in row.in_words()


def test_both_not_finite_is_the_same() -> None:
    lost = trace(losses={1: 2.0, 2: math.nan, 3: 0.5})
    assert judge(Row("x", "ddp", "mpi", 2), lost, lost, 0.0, same_shares=True).equal
