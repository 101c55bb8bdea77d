"""The house rules: which module may import which, who reads the environment, how long a file may be."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launchers import ROOT, environment

PACKAGE = ROOT / "hvd_ddp"
FILES = sorted(PACKAGE.rglob("*.py"))
# Lower layers know nothing of higher ones.
LAYERS = [
    {"errors", "config", "durable", "outside", "recipes", "layout"},
    {"job", "horovod_build"},
    {"heap"},
    {"backends"},
    {
        "data",
        "models",
        "precision",
        "optim",
        "ema",
        "tasks",
        "log",
        "trackers",
        "seeding",
        "snapshot",
        "decisions",
        "finite",
        "history",
        "anatomy",
        "costs",
        "profiling",
    },
    {"metrics", "checkpoint", "lock", "evaluation", "saving", "banner", "replicas", "state"},
    {"resume"},
    {"run", "assemble"},
    {"trainer", "doctor"},
    {"commands", "examples"},
    {"main"},
]
HEAVY = {"torch", "torchvision", "horovod", "mpi4py", "ray", "matplotlib", "numpy", "numba"}
HEAVY |= {"tensorboard", "mlflow", "wandb"}  # which only the modules of trackers import, when they are asked for
LATE = {"horovod", "mpi4py", "ray", "matplotlib", "numba"}  # imported only inside functions, anywhere


def part(path: Path) -> str:
    """The top-level part of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def level(name: str) -> int | None:
    return next((number for number, layer in enumerate(LAYERS) if name in layer), None)


def test_every_part_has_a_layer() -> None:
    assert {part(path) for path in FILES} - set.union(*LAYERS) == {"__init__", "__main__"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    own = level(part(path))
    if own is None:
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "hvd_ddp" and len(parts) > 1 and (other := level(parts[1])) is not None:
            assert other <= own, f"{path.name} imports {name} of a higher layer"


@pytest.mark.parametrize("folder", ["data", "models.py", "optim.py", "tasks.py"])
def test_data_and_models_know_no_backend(folder: str) -> None:
    target = PACKAGE / folder
    for path in [target] if target.is_file() else target.rglob("*.py"):
        assert not [name for name in imports(path) if name.startswith(("hvd_ddp.backends", "hvd_ddp.job"))], path


def test_backends_know_no_trainer_and_no_data() -> None:
    for path in (PACKAGE / "backends").rglob("*.py"):
        assert not [name for name in imports(path) if name.startswith(("hvd_ddp.trainer", "hvd_ddp.data"))], path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_late_imports_are_late(path: Path) -> None:
    """But in a script that is not ours."""
    if path.name != "horovod_before.py":
        assert not {name.split(".")[0] for name in imports(path, top_level=True)} & LATE


def test_the_environment_is_touched_in_one_place() -> None:
    """But for the builder and the script of `bench start`, other programs in the same house."""
    allowed = [
        *(PACKAGE / "horovod_build").iterdir(),
        PACKAGE / "commands/install_horovod.py",
        PACKAGE / "commands/bench_script.py",
        PACKAGE / "job/launch.py",
    ]
    for path in FILES:
        if path not in allowed:
            assert not re.search(r"\bos\.(environ|getenv|putenv)\b|import environ", path.read_text()), path


def test_no_backend_is_named_outside_backends() -> None:
    for name in ("trainer.py", "run.py", "evaluation.py", "metrics.py", "checkpoint.py", "assemble.py"):
        text = (PACKAGE / name).read_text()
        assert "horovod" not in text.lower(), name
        assert not [line for line in text.splitlines() if "if" in line.split() and "backend.name" in line], name


def test_budgets() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in FILES}
    assert lines[PACKAGE / "trainer.py"] <= 300
    assert {str(path): count for path, count in lines.items() if count > 300} == {}


def test_no_two_files_of_tests_share_a_name() -> None:
    """pytest imports them by name alone, so that with two of one name a whole run ends before its first test."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name.startswith("test_")]
    assert {name for name in names if names.count(name) > 1} == set()


def test_functions_are_short() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 50, f"{path.name}: {node.name} has {length} lines"


def test_nothing_unpickles() -> None:
    """From disk or network: loader workers get the user's data set from the rank that has started them."""
    for path in FILES:
        text = path.read_text()
        if path == PACKAGE / "data/workers.py":
            text = text.replace("import pickle\n", "").replace("pickle.loads(reader)", "reader")
        for word in ("import pickle", "cloudpickle.load", "weights_only=False", "allow_pickle=True", "yaml.load("):
            assert word not in text, f"{path.name} has {word}"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(word.arg == "weights_only" for word in node.keywords), path


def test_importing_does_nothing_heavy() -> None:
    code = f"import sys, hvd_ddp; print([name for name in {sorted(HEAVY)} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result


def test_help_is_light() -> None:
    """No torch, no numpy: that is what keeps it under half a second."""
    code = (
        "import sys\n"
        "from hvd_ddp.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        f"sys.stderr.write(str([name for name in {sorted(HEAVY)} if name in sys.modules]))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert result.stderr == "[]"
    assert "--global-batch" in result.stdout


@pytest.mark.parametrize("tool", [["mypy"], ["ruff", "check", "."], ["ruff", "format", "--check", "."]], ids=" ".join)
def test_static_checks(tool: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", *tool], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_shell_scripts() -> None:
    templates = [str(path) for path in (ROOT / "slurm").iterdir() if path.suffix != ".def"]
    scripts = [str(ROOT / "tests/run"), str(ROOT / ".ci/run"), *templates]
    result = subprocess.run(["shellcheck", *scripts], env=environment(), capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout
