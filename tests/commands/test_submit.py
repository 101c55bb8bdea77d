"""submit: the command for each scheduler; what train would refuse is refused before a job waits."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from launchers import Result

Cli = Callable[..., Result]
ALL = ["--nodes", "4", "--ranks-per-node", "8", "--cores-per-rank", "2", "--time", "1:30:20", "--queue", "fast",
       "--account", "me", "--name", "mine"]  # fmt: skip
TRAINING = ["--data", "digits", "--max-steps", "5"]


@pytest.mark.parametrize(
    ("ending", "wanted"),
    [
        (
            "sbatch",
            "sbatch --nodes=4 --ntasks-per-node=8 --cpus-per-task=2 --time=01:30:20 --partition=fast --account=me "
            "--job-name=mine own.sbatch --data digits --max-steps 5",
        ),
        (
            "pbs",
            "env 'OPTIONS=--data digits --max-steps 5' qsub -v OPTIONS -l select=4:ncpus=16:mpiprocs=8 -l "
            "walltime=01:30:20 -q fast -A me -N mine own.pbs",
        ),
        (
            "lsf",
            "env 'OPTIONS=--data digits --max-steps 5' bsub -n 32 -R 'span[ptile=8]' -R 'affinity[core(2)]' -W 01:31 "
            "-q fast -P me -J mine < own.lsf",
        ),
    ],
)
def test_the_command(ending: str, wanted: str, cli: Cli) -> None:
    Path(f"own.{ending}").touch()
    template = ["--template", f"own.{ending}", "--show"]
    result = cli("submit", *ALL, *template, "--", *TRAINING)
    assert (result.code, result.out.strip()) == (0, wanted), result.text
    short = cli("submit", *template).out.strip()
    assert short.split("<")[0].split()[-1] in (f"own.{ending}", "bsub") and "-l" not in short and "=4" not in short


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that notes what it is given."""
    program = tmp_path / "bin/bsub"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$OPTIONS" "$@" >note\n/bin/cat >>note\necho "Job <7> is submitted"\n')
    program.chmod(0o755)
    (program.parent / "env").symlink_to("/usr/bin/env")
    monkeypatch.setenv("PATH", str(program.parent))
    return program


def test_it_is_submitted(scheduler: Path, cli: Cli) -> None:
    Path("slurm").mkdir()
    Path("slurm/train.lsf").write_text("the script\n")
    result = cli("submit", "--nodes", "1", "--ranks-per-node", "2", "--", *TRAINING)
    assert result.code == 0 and "Job <7> is submitted" in result.out, result.text
    assert Path("note").read_text() == "--data digits --max-steps 5 -n 2 -R span[ptile=2]\nthe script\n"
    scheduler.write_text("#!/bin/sh\necho no such queue >&2\nexit 255\n")
    result = cli("submit")
    assert result.code == 1 and "no such queue" in result.err


def test_the_template_of_the_repository(scheduler: Path, cli: Cli) -> None:
    """Where the user has no copy."""
    result = cli("submit", "--show")
    assert result.code == 0 and shlex.split(result.out)[-1].endswith("/slurm/train.lsf")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--show", "--", "--epochs", "0"], "--epochs is `0`"),
        (["--nodes", "0"], "--nodes is `0`"),
        (["--time", "90"], "--time is `90`"),
        (["--template", "nowhere.pbs"], "`nowhere.pbs` is no file"),
        (["--template", "script.sh"], "for no scheduler that is known"),
        (["--nodes", "2", "--show"], "takes both or neither"),
        (["--show", "--", "--run-dir", "my runs"], "`my runs` has white space"),
        (["--epochs", "3"], "--epochs"),
    ],
)
def test_bad_input(arguments: list[str], wanted: str, scheduler: Path, cli: Cli) -> None:
    result = cli("submit", *arguments)
    assert result.code == 2 and wanted in result.err and "Traceback" not in result.err, result.text
    assert not Path("note").exists()


def test_without_a_scheduler(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "None of sbatch, qsub, bsub is on PATH" in cli("submit").err
    Path("own.pbs").touch()
    assert "`qsub` is not on PATH" in cli("submit", "--template", "own.pbs").err
