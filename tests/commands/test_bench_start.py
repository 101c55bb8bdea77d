"""bench start: two programs that do the same training, and what is taken of them."""

import json
import re
import statistics
import sys
import time
from pathlib import Path

import pytest
import torch
from launchers import ROOT, Result, assert_none_left, command, environment, run

from hvd_ddp.commands import bench_script, bench_start
from hvd_ddp.errors import RankFailedError
from hvd_ddp.models import ConvNet


def bench(*arguments: str, cwd: Path) -> Result:
    program = ["-m", "hvd_ddp", "bench", "start", *arguments]
    result = run(command("python", 1, program), timeout=300, cwd=cwd, PYTHONPATH=str(ROOT))
    assert result.code == 0, result.text[-4000:]
    assert_none_left(str(cwd))
    return result


@pytest.mark.full
def test_as_json(tmp_path: Path) -> None:
    said = json.loads(bench("--repeats", "2", "--json", cwd=tmp_path).out)
    ways = ["ddp gloo, torchrun", "ddp gloo, mpirun", "horovod mpi, mpirun"]
    assert [row["name"] for row in said["rows"]] == [f"{who}, {way}" for way in ways for who in ("hvd_ddp", "by hand")]
    for row in said["rows"]:
        assert len(row["repeats"]) == len(row["peak_megabytes_repeats"]) == 2
        assert row["seconds"] == statistics.median(row["repeats"]) > 0.5, "torch alone takes more to import"
        assert 100 < row["peak_megabytes"] < 4000
    assert [found["backend"] for found in said["ratios"]] == ["ddp", "ddp", "horovod"]
    for found, ours, script in zip(said["ratios"], said["rows"][::2], said["rows"][1::2], strict=True):
        assert found["peak_megabytes_to_by_hand"] == ours["peak_megabytes"] / script["peak_megabytes"]
        low, high = found["seconds_to_by_hand_interval"]
        assert low < found["seconds_to_by_hand"] < high
    assert not list(tmp_path.iterdir()), "left behind"


def test_both_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(OMP_NUM_THREADS="1").items():
        monkeypatch.setenv(name, value)
    pairs = bench_start._pairs(2)
    assert [(pair[0].launcher, pair[0].backend) for pair in pairs] == [
        ("torchrun", "ddp"), ("mpirun", "ddp"), ("mpirun", "horovod")
    ]  # fmt: skip
    for program in pairs[1]:
        folder = tmp_path / program.name
        folder.mkdir()
        program.turn(folder)
        assert program.seconds[0] > 0.5 and 100 < program.megabytes[0] < 4000, "torch alone takes more"
    assert_none_left(str(tmp_path))


def program(code: str) -> bench_start.Program:
    return bench_start.Program("mpirun", "ddp", "gloo", [sys.executable, "-c", code], by_hand=True)


def test_a_turn(tmp_path: Path) -> None:
    """The time of the line itself, not of the end; the memory of the largest of its processes, not of the first."""
    child = "import time; x = bytearray(1_500_000_000); print('12:00:00 step 1/20', flush=True); time.sleep(0.8)"
    one = program(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); print('step 2')")
    began = time.perf_counter()
    one.turn(tmp_path)
    took = time.perf_counter() - began
    (seconds,), (megabytes,) = one.seconds, one.megabytes
    assert seconds < took - 0.8 and 1500 < megabytes < 1800
    two = program("import time; time.sleep(1.5); print('step 10'); print('step 1 of 9'); print('step 2')")
    two.turn(tmp_path)
    assert two.seconds[0] > 1.5 and two.megabytes[0] < 1500


def test_the_one_that_measures_is_small() -> None:
    """Until a program that it starts has begun, the kernel takes this process for it."""
    code = "import sys; from hvd_ddp.commands import bench_start; bench_start._pairs(2); print('torch' in sys.modules)"
    assert run([sys.executable, "-c", code]).out == "False\n"


@pytest.mark.parametrize(("code", "said"), [("pass", "It ended with 0."), ("print('step 1'); 1 / 0", "ZeroDivision")])
def test_one_that_fails(code: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match=f"by hand, ddp gloo, mpirun failed: {said}"):
        program(code).turn(tmp_path)


def test_the_script_trains_the_same_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The shapes of its parameters, its optimizer, its samples: in one epoch each once over the ranks."""
    seen = {}

    def loop(model, optimizer, rows, inputs, targets):
        seen["model"], seen["optimizer"], seen["rows"], seen["inputs"] = model, optimizer, list(rows), inputs

    monkeypatch.setattr(bench_script.bench_bare, "ddp", loop)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    threads = torch.get_num_threads()
    try:
        bench_script.main("ddp", 3, "store")
    finally:
        torch.set_num_threads(threads)
    shapes = [tuple(tensor.shape) for tensor in ConvNet(10, 1).parameters()]
    assert [tuple(tensor.shape) for tensor in seen["model"].parameters()] == shapes
    assert isinstance(seen["optimizer"], torch.optim.Adam)
    assert seen["inputs"].shape == (1437, 1, 8, 8) and [len(rows) for rows in seen["rows"]] == [32] * 3
    assert re.findall(r"step \d+", capsys.readouterr().out) == ["step 1", "step 2", "step 3"]
