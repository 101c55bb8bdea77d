"""The programs in hvd_ddp/examples, on two ranks as a person starts them; scripts before and after are one training."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launchers import ROOT, Result, command, run
from rundir import distance, summary

import hvd_ddp
from hvd_ddp import connect
from hvd_ddp.examples import own_loop

FOLDER = ROOT / "hvd_ddp/examples"
PAIRS = {"horovod": "horovodrun", "ddp": "torchrun"}
ALONE = ["own_model_and_data", "own_loop", "own_task"]
LOSSES = re.compile(r"epoch \d: loss (\S+)")
DOUBLE = """
import runpy, sys, torch
torch.set_default_dtype(torch.float64)
runpy.run_module(sys.argv[1], run_name="__main__")
"""
pytestmark = pytest.mark.timeout(300)


def start(launcher: str, num_ranks: int, name: str, cwd: Path) -> Result:
    """The example in float64, which rounds too little to hide anything."""
    cwd.mkdir(exist_ok=True)
    (cwd / "double.py").write_text(DOUBLE)
    result = run(command(launcher, num_ranks, ["double.py", f"hvd_ddp.examples.{name}"]), cwd=cwd, OMP_NUM_THREADS="1")
    assert result.code == 0, result.text[-3000:]
    return result


def test_each_has_a_test_and_says_how_it_is_started() -> None:
    tested = {*ALONE, *(f"{name}_{when}" for name in PAIRS for when in ("before", "after"))}
    files = {path.stem: path.read_text() for path in FOLDER.glob("*.py") if path.stem != "__init__"}
    assert set(files) == tested
    for name, text in files.items():
        head = text.split('"""')[1]
        launchers = {"horovod_before": ["horovodrun"], "ddp_before": ["torchrun"]}.get(
            name, ["torchrun", "horovodrun", "srun"]
        )
        for launcher in launchers:
            assert re.search(rf"{launcher} .*-m", head), f"{name}: {launcher}"
        assert len(text.splitlines()) < 80, name


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, torch.Tensor], list[str]]]:
    """The weights and losses of the script before, under the launcher that it needs; run once."""

    @functools.cache
    def weights_and_losses(name: str) -> tuple[dict[str, torch.Tensor], list[str]]:
        folder = tmp_path_factory.mktemp(name)
        losses = LOSSES.findall(start(PAIRS[name], 2, f"{name}_before", folder).out)
        assert len(losses) == 3 and float(losses[-1]) < 0.5 * float(losses[0]), "it learns"
        return torch.load(folder / "model.pt", weights_only=True), losses

    return weights_and_losses


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("horovod", "torchrun"),
        ("ddp", "horovodrun"),
        pytest.param("horovod", "horovodrun", marks=pytest.mark.full),
        pytest.param("ddp", "torchrun", marks=pytest.mark.full),
    ],
)
def test_before_and_after_end_with_the_same_weights(
    name: str,
    launcher: str,
    before: Callable[[str], tuple[dict[str, torch.Tensor], list[str]]],
    tmp_path: Path,
) -> None:
    """Under the other backend than before, which is more; the same one under full."""
    wanted, losses = before(name)
    after = start(launcher, 2, f"{name}_after", tmp_path)
    mine = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(value.dtype == torch.float64 for value in mine.values())
    assert distance(mine, wanted) <= 1e-12
    assert LOSSES.findall(after.out) == losses


def test_own_model_and_data(tmp_path: Path) -> None:
    start("torchrun", 2, "own_model_and_data", tmp_path)
    found = summary(tmp_path / "runs/spirals")
    assert (found["status"], found["world_size"], found["backend"]) == ("finished", 2, "ddp")
    assert found["accuracy"] > 0.95


def test_own_loop(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same figures on two ranks as in this process."""
    torch.set_default_dtype(torch.float64)
    try:
        with connect("local", threads=1) as backend:
            own_loop.main(backend)
    finally:
        torch.set_default_dtype(torch.float32)
    said = [capfd.readouterr().out, start("horovodrun", 2, "own_loop", tmp_path).out]
    counts = [[int(count) for count in re.findall(r"epoch \d: (\d+) of 400 right", out)] for out in said]
    assert counts[0] == counts[1] and len(counts[0]) == 4 and counts[0][-1] > 360


def test_own_task(tmp_path: Path) -> None:
    """As it says itself, with fewer steps. Letters by their frequency alone take more than 4 bits each."""
    (text,) = re.findall(r"python (-m hvd_ddp .*?--max-steps) 150\n", (FOLDER / "own_task.py").read_text(), re.DOTALL)
    program = [*text.replace("\\", " ").split(), "60", "--threads", "1", "--run-dir", "run"]
    result = run(command("--nproc", 2, program), cwd=tmp_path)
    assert result.code == 0, result.text[-3000:]
    found = summary(tmp_path / "run")
    assert found["bits_per_character"] < 4 and found["best"] == {"step": 60, "loss": found["loss"]}


def test_the_public_face() -> None:
    from hvd_ddp import Backend, Task, TrainConfig, Trainer, connect  # noqa: F401

    for name in hvd_ddp.__all__:
        assert getattr(hvd_ddp, name).__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'trainer_of_my_dreams'"):
        _ = hvd_ddp.trainer_of_my_dreams
