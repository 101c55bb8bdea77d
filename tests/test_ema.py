"""The moving average of the parameters: by the formula, evaluated, saved, and the same after a stop."""

import json
from pathlib import Path

import pytest
import torch
from launchers import command, run, train
from torch import nn

from hvd_ddp.ema import Average


def test_it_follows_the_formula_and_leaves_the_model_alone() -> None:
    model = nn.Linear(2, 1, bias=False)
    average, wanted = Average(model, 0.5), model.weight.detach().clone()
    for updates, decay in ((1, 2 / 11), (2, 3 / 12), (90, 0.5)):
        with torch.no_grad():
            model.weight.add_(updates)
        average.update(updates)
        wanted = decay * wanted + (1 - decay) * model.weight.detach()
        torch.testing.assert_close(average.state_dict()["weight"], wanted)
    last = model.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), average.applied():
        torch.testing.assert_close(model.weight.detach(), wanted)
        raise ZeroDivisionError
    assert torch.equal(model.weight, last)


@pytest.mark.timeout(300)
def test_a_run_in_parts_has_the_same_average_and_evaluates_it(tmp_path: Path) -> None:
    options = ["--ema", "0.9", "--model", "convnet"]
    for name, parts in (("whole", [30]), ("parts", [11, 30])):
        for steps in parts:
            result = train("torchrun", 2, *options, "--max-steps", str(steps), "--run-dir", name, cwd=tmp_path)
            assert result.code == 0, result.text[-3000:]
    whole, parted = (
        torch.load(tmp_path / name / "checkpoints/step_00000030.pt", weights_only=True) for name in ("whole", "parts")
    )
    assert whole["ema"].keys() == whole["model"].keys()
    for part in ("model", "ema"):
        assert all(torch.equal(whole[part][name], parted[part][name]) for name in whole[part])
    assert not torch.equal(whole["ema"]["classifier.2.bias"], whole["model"]["classifier.2.bias"])
    summary = json.loads((tmp_path / "whole/summary.json").read_text())
    result = run(command("python", 1, ["-m", "hvd_ddp", "evaluate", "whole", "--json"]), cwd=tmp_path)
    assert json.loads(result.out)["loss"] == pytest.approx(summary["loss"], rel=1e-5)
