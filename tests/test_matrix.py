"""Backend by launcher: every cell is a real start of the command line, and all end with the same bits."""

import os
import re
from pathlib import Path

import pytest
import torch
from launchers import Result, command, run, train
from rundir import different, newest, summary, tensors

# (launcher, --backend): (what must have been chosen)
CELLS = {
    ("--nproc", "ddp"): ("ddp", "gloo"),
    ("--nproc", "horovod"): ("horovod", "gloo"),
    ("torchrun", "auto"): ("ddp", "gloo"),
    ("torchrun", "horovod"): ("horovod", "gloo"),
    ("mpirun", "auto"): ("ddp", "mpi"),
    ("mpirun", "horovod"): ("horovod", "mpi"),
    ("mpiexec.mpich", "auto"): ("ddp", "gloo"),
    ("mpiexec.mpich", "horovod"): ("horovod", "gloo"),
    ("horovodrun --gloo", "auto"): ("horovod", "gloo"),
    ("horovodrun --gloo", "ddp"): ("ddp", "gloo"),
    ("horovodrun", "auto"): ("horovod", "mpi"),
    ("horovodrun", "ddp"): ("ddp", "mpi"),
}
OPTIONS = ["--max-steps", "12", "--global-batch", "50", "--clip-norm", "0.5", "--optimizer", "adamw",
           "--weight-decay", "0.1", "--accumulate", "2", "--save-every", "5", "--log-every", "4"]  # fmt: skip
SEEN: dict[tuple[str, str], dict] = {}


def start(launcher: str, num_ranks: int, backend: str, folder: Path) -> tuple[Result, dict, dict]:
    result = train(launcher, num_ranks, *OPTIONS, "--backend", backend, "--run-dir", str(folder / "run"), cwd=folder)
    assert result.code == 0, result.text[-4000:]
    state = newest(folder / "run")
    assert state["progress"]["step"] == 12
    return result, state, summary(folder / "run")


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    _, state, _ = start("torchrun", 2, "ddp", tmp_path_factory.mktemp("wanted"))
    return tensors(state)


@pytest.mark.parametrize(("launcher", "backend"), CELLS)
def test_two_ranks_end_with_the_same_bits(launcher: str, backend: str, wanted: dict, tmp_path: Path) -> None:
    result, state, said = start(launcher, 2, backend, tmp_path)
    chosen = CELLS[launcher, backend]
    assert (said["backend"], said["transport"]) == chosen
    assert said["world_size"] == 2
    assert said["status"] == "finished"
    assert f"backend {chosen[0]} (" in result.out  # the banner says what was chosen and why
    assert "launcher " in result.out
    if launcher.startswith("horovodrun") and backend == "auto":
        assert "backend horovod (horovodrun started it)" in result.out
    assert different(tensors(state), wanted) == []
    assert not list(tmp_path.glob("**/.rendezvous*")), "left behind by the rendezvous"
    assert result.out.count("finished: ") == 1


def test_local(wanted: dict, tmp_path: Path) -> None:
    """One process sums in another order: close, not equal (float64 is held to 1e-12 in tests/contract)."""
    _, state, said = start("python", 1, "auto", tmp_path)
    assert (said["backend"], said["launcher"], said["world_size"]) == ("local", "single", 1)
    for name, tensor in state["model"].items():
        assert torch.allclose(tensor, wanted[f"model.{name}"], atol=1e-3), name


def test_the_same_threads_a_rank_under_every_launcher(tmp_path: Path) -> None:
    """torchrun sets OMP_NUM_THREADS=1, mpirun binds to cores, others do neither: the number changes the bits."""
    program = tmp_path / "threads.py"
    program.write_text(
        "import torch\nfrom hvd_ddp import connect\n"
        "with connect(device='cpu') as backend:\n"
        "    print(f'threads {torch.get_num_threads()}\\n', end='', flush=True)\n"
    )
    wanted = str(max(1, (os.cpu_count() or 1) // 2))
    for launcher in ("torchrun", "mpirun", "mpiexec.mpich", "horovodrun --gloo"):
        result = run(command(launcher, 2, [str(program)]), cwd=tmp_path)
        assert result.code == 0, result.text[-3000:]
        assert re.findall(r"threads (\d+)", result.out) == [wanted, wanted], launcher
