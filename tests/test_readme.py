"""What the README shows is what happens."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from launchers import ROOT, environment, run, train

TEXT = (ROOT / "README.md").read_text()
BLOCKS = {language: re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL) for language in ("bash", "python")}


def block(word: str) -> list[str]:
    """The commands of the one bash block that has this word, without comments."""
    (found,) = [text for text in BLOCKS["bash"] if word in text]
    return [line.split("  #")[0].strip() for line in found.splitlines()]


def test_the_default_training_under_real_horovod(tmp_path: Path) -> None:
    """Two Horovod ranks, no option: over 97 % on the held-out fifth."""
    assert "horovodrun -np 2 python -m hvd_ddp" in block("install-horovod")[0]
    result = run(["horovodrun", "-np", "2", sys.executable, "-m", "hvd_ddp"], cwd=tmp_path, timeout=200)
    assert result.code == 0, result.text[-3000:]
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["accuracy"] > 0.97
    assert (summary["backend"], summary["transport"], summary["status"]) == ("horovod", "mpi", "finished")
    last = result.out.strip().splitlines()[-1]
    assert re.search(r"finished: 276 steps in .* accuracy 0\.9\d+, loss 0\.\d+; runs/", last)


@pytest.mark.parametrize("word", ["runs/first", "options.yaml", "data prepare", "runs/watched", "runs/mine"])
def test_commands(word: str, tmp_path: Path) -> None:
    shell = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment()['PATH']}"}
    for line in block(word):
        result = run(["bash", "-c", line], cwd=tmp_path, timeout=150, **shell)
        assert result.code == 0, line + "\n" + result.text[-3000:]


def test_the_doctor(tmp_path: Path) -> None:
    """On this machine; tests/slurm has the one across hosts."""
    for line in block("doctor"):
        if not line.startswith("srun"):
            result = run(["bash", "-c", line], cwd=tmp_path, timeout=150)
            assert result.code == 0, line + "\n" + result.text[-3000:]
            assert re.search(r"^\d+ ok(, \d+ warnings)?$", result.out, re.MULTILINE), result.out


def test_the_commands_of_the_picture(tmp_path: Path) -> None:
    """With few steps."""
    *trainings, plot = block("runs/horovod")
    shell = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment()['PATH']}"}
    for line in [*(f"{line} --max-steps 20" for line in trainings), plot]:
        result = run(["bash", "-c", line], cwd=tmp_path, timeout=150, **shell)
        assert result.code == 0, line + "\n" + result.text[-3000:]
    pictures = [ROOT / name for name in re.findall(r"\]\((\.pictures/.*?)\)", TEXT)]
    assert "fashion_mnist.svg" in plot and ROOT / ".pictures/fashion_mnist.svg" in pictures
    for path in (tmp_path / "fashion_mnist.svg", *pictures):
        assert path.read_text().startswith("<?xml") and path.stat().st_size < 150_000


@pytest.mark.parametrize("number", range(len(BLOCKS["python"])))
def test_python(number: int, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(BLOCKS["python"][number])
    result = run(["torchrun", "--nproc-per-node", "2", "example.py"], cwd=tmp_path)
    assert result.code == 0, result.text[-3000:]


def test_the_tree_names_what_is_there() -> None:
    tree = TEXT.split("## The house")[1]
    for name in re.findall(r"^\s+(\w+\.py|\w+/)  ", tree, re.MULTILINE):
        assert list((ROOT / "hvd_ddp").rglob(name.rstrip("/"))) or (ROOT / name).is_dir(), name


def test_the_package_has_its_data(tmp_path: Path) -> None:
    """A wheel, built from a copy so that no build folder is left in the clone."""
    for name in ("setup.py", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "hvd_ddp", tmp_path / "hvd_ddp", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", "wheels", "."]
    subprocess.run(command, cwd=tmp_path, env=environment(), check=True, timeout=200)
    (wheel,) = (tmp_path / "wheels").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "data/digits.npz",
        "data/DIGITS.md",
        "py.typed",
        "job/launch.py",
        "commands/train.py",
        "recipes/cifar100.yaml",
    ):
        assert f"hvd_ddp/{wanted}" in names
    assert not [name for name in names if name.startswith("tests")]


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_the_first_command_in_a_fresh_environment(tmp_path: Path) -> None:
    """As a newcomer: a clone, an empty cache, the README's first line."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "clone")], check=True, timeout=100)
    (line,) = block("install-horovod")
    env = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": ""}
    assert train("python", 1, "--help").code == 0
    result = run(["bash", "-c", line], cwd=tmp_path / "clone", timeout=2900, **env)
    assert result.code == 0, result.text[-4000:]
    (folder,) = (tmp_path / "clone/runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["accuracy"] > 0.97
