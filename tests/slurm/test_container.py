"""The Apptainer definition, without Apptainer, which can't be had here: its sections are looked at, or run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import ROOT, environment, run

LINES = (ROOT / "slurm/hvd_ddp.def").read_text().splitlines()
SCRIPTS = ("post", "environment", "runscript", "test")


def section(name: str) -> str:
    """The lines below `%name`."""
    begin = LINES.index(f"%{name}") + 1
    end = next((number for number in range(begin, len(LINES)) if LINES[number].startswith("%")), len(LINES))
    return "\n".join(LINES[begin:end]) + "\n"


def files() -> list[list[str]]:
    """What is copied, and where to."""
    return [line.split() for line in section("files").splitlines() if line]


def test_its_head() -> None:
    head = [line for line in LINES[: LINES.index("%files")] if line and not line.startswith("#")]
    assert head == ["Bootstrap: docker", "From: debian:bookworm-slim"]
    assert [line[1:] for line in LINES if line.startswith("%")] == ["files", *SCRIPTS]
    assert "build train.sif slurm/hvd_ddp.def" in "\n".join(LINES)
    assert "${IMAGE:-train.sif}" in (ROOT / "slurm/container.sbatch").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_its_scripts_are_shell(name: str) -> None:
    """Apptainer runs them with sh."""
    for command in (["sh", "-n"], ["shellcheck", "--shell=sh", "-"]):
        result = subprocess.run(
            command, input=section(name), env=environment(), capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_its_files_are_all_that_the_package_is_built_from() -> None:
    pairs = files()
    assert all((ROOT / source).exists() and target == f"/opt/hvd_ddp/{source}" for source, target in pairs)
    built_from = {"setup.cfg", "setup.py", "README.md", "LICENSE", "hvd_ddp"}  # as tests/test_readme.py makes a wheel
    assert {source for source, _ in pairs} == built_from


def test_what_it_installs_is_what_the_tests_run_on() -> None:
    (words,) = re.findall(r"apt-get install -qy --no-install-recommends (.*)", section("post"))
    (system,) = re.findall(r"^system=\((.*)\)", (ROOT / "tests/run").read_text(), re.MULTILINE)
    assert set(words.split()) <= set(system.split())
    (extras,) = re.findall(r"pip install --no-cache-dir '\.\[(\w+)\]'", section("post"))
    assert f"\n{extras} =\n" in (ROOT / "setup.cfg").read_text()


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_its_scripts_make_an_image_that_trains(tmp_path: Path) -> None:
    """On the system that is here: with an /opt of its own, and without the steps of apt-get."""
    stand_in = tmp_path / "bin/apt-get"
    stand_in.parent.mkdir()
    stand_in.write_text("#!/bin/sh\n")
    stand_in.chmod(0o755)
    for name in ("lists", "opt"):
        (tmp_path / name).mkdir()
    copies = [f"cp -r {ROOT / source} {target}" for source, target in files()]
    parts = {name: tmp_path / name for name in SCRIPTS}
    for name, path in parts.items():
        path.write_text(section(name))
    script = [
        "set -e",
        f"mount --bind {tmp_path}/opt /opt",
        f"mount --bind {tmp_path}/lists /var/lib/apt/lists",
        "mkdir /opt/hvd_ddp",
        *copies,
        f"sh {parts['post']}",
        f". {parts['environment']}",
        f"sh {parts['test']}",
        f"sh {parts['runscript']} --nproc 2 --max-steps 2 --run-dir {tmp_path}/run --backend horovod",
    ]
    python = Path(sys.executable).resolve().parent  # of the system: /opt/venv is made from it
    path = f"{stand_in.parent}:{python}:/usr/local/bin:/usr/bin:/bin"
    result = run(
        ["unshare", "--mount", "sh", "-c", "\n".join(script)], cwd=tmp_path, timeout=2900, PATH=path, PYTHONPATH=""
    )
    shutil.rmtree(tmp_path / "opt")  # 6 GB
    assert result.code == 0, result.text[-4000:]
    assert result.out.count("finished: 2 steps") == 2
    assert not list(Path("/opt").glob("venv"))
