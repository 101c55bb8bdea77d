"""What a user gets wrong: exit code 2, one paragraph that says what and how to mend it, and nothing written over.

Most starts run in this process (`cli`); where a launcher, an import or a whole process is what matters, as a user
would start them (`run` of launchers.py).
"""

import dataclasses
import gzip
import hashlib
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from launchers import BIN, ROOT, Result, command, environment, run

from hvd_ddp.config import TrainConfig, may_change
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.main import main
from hvd_ddp.precision import Precision

FAST = ["--max-steps", "2", "--threads", "1"]
Cli = Callable[..., Result]


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file below, also of none."""
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def words(text: str) -> str:
    """Without boxes, colours and line breaks."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return " ".join(re.sub(r"[─│╭╮╰╯-]{3,}|[│╭╮╰╯]", " ", plain).split())


def refused(result: Result, *wanted: str, box: bool = False) -> None:
    """Exit code 2, one paragraph (or one box of the parser) on stderr that has these words, no traceback."""
    assert result.code == 2, result.text[-3000:]
    assert "Traceback" not in result.text, result.text
    said = words(result.err)
    if box:
        assert said.count("For full helptext") == 1, result.err
    else:
        lines = [line for line in result.err.splitlines() if line.strip()]
        assert len(lines) == 1, result.err
        assert lines[0].startswith("hvd_ddp: "), result.err
        assert result.err.count(". ") + result.err.rstrip().endswith(".") >= 1, "fact and remedy"
    for word in wanted:
        assert word in said, f"no `{word}` in: {said}"
    assert not re.search(r"\bstep \d+/", result.out), "it trained"


# A finished run of two steps, to be spoiled


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main([*FAST, "--model", "factories:Small", "--run-dir", str(folder)]) == 0
    assert (folder / "checkpoints" / "step_00000002.pt").exists()
    return folder


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def nothing(tmp_path: Path) -> Iterator[Path]:
    """A run directory that is not there, nor afterwards; nor is anything in the working directory."""
    folder = tmp_path / "none"
    yield folder
    assert not folder.exists(), snapshot(folder).keys()
    assert snapshot(tmp_path / "cwd") == {}


SAME = [*FAST, "--model", "factories:Small"]


# Options


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--global-bach", "3"], ["Unrecognized options: --global-bach", "--global-batch"]),
        (["--globalbatch=3"], ["Unrecognized options", "--global-batch"]),
        (["train", "extra"], ["Unrecognized options: extra"]),
        (["--backend", "hvd"], ["--backend", "'auto', 'ddp', 'horovod', 'local'"]),
        (["--transport", "tcp"], ["--transport", "'auto', 'nccl', 'gloo', 'mpi'"]),
        (["--precision", "fp8"], ["--precision", "'fp64', 'fp32', 'bf16', 'fp16'"]),
        (["--optimizer", "adamm"], ["--optimizer", "'sgd', 'adam', 'adamw'"]),
        (["--schedule", "linear"], ["--schedule", "'constant', 'cosine', 'step'"]),
        (["--epochs", "0"], ["--epochs is `0`", "1 up"]),
        (["--max-steps", "0"], ["--max-steps is `0`"]),
        (["--max-steps", "-5"], ["--max-steps is `-5`"]),
        (["--epochs", "many"], ["--epochs", "'many'"]),
        (["--epochs", "1.5"], ["--epochs", "'1.5'"]),
        (["--epochs"], ["--epochs", "Missing"]),
        (["--global-batch", "0"], ["--global-batch is `0`"]),
        (["--accumulate", "0"], ["--accumulate is `0`"]),
        (["--nproc", "0"], ["--nproc is `0`"]),
        (["--nproc", "two"], ["--nproc", "two"]),
        (["--threads", "0"], ["--threads is `0`"]),
        (["--threads", "all"], ["--threads", "auto"]),
        (["--keep", "0"], ["--keep is `0`"]),
        (["--lr", "0"], ["--lr is `0.0`"]),
        (["--lr", "-1"], ["--lr is `-1.0`"]),
        (["--lr", "nan"], ["--lr is `nan`"]),
        (["--lr", "inf"], ["--lr is `inf`"]),
        (["--weight-decay", "nan"], ["--weight-decay is `nan`"]),
        (["--weight-decay", "inf"], ["--weight-decay is `inf`"]),
        (["--decay-factor", "nan"], ["--decay-factor is `nan`"]),
        (["--decay-factor", "-1"], ["--decay-factor is `-1.0`"]),
        (["--momentum", "-0.1"], ["--momentum is `-0.1`"]),
        (["--momentum", "inf"], ["--momentum is `inf`"]),
        (["--clip-norm", "0"], ["--clip-norm is `0.0`"]),
        (["--label-smoothing", "1"], ["--label-smoothing is `1.0`"]),
        (["--ema", "1"], ["--ema is `1.0`"]),
        (["--bucket-mb", "0"], ["--bucket-mb is `0.0`. Give a number from 1e-06 to 1048576"]),
        (["--fusion-mb", "-1"], ["--fusion-mb is `-1.0`. Give a number from 0 to"]),
        (["--cycle-ms", "nan"], ["--cycle-ms is `nan`"]),
        (["--compression", "fp8"], ["--compression", "powersgd"]),
        (["--warmup-steps", "-1"], ["--warmup-steps is `-1`"]),
        (["--seed", "-1"], ["--seed is `-1`"]),
        (["--seed", str(2**64)], [f"--seed is `{2**64}`"]),
        (["--timeout", "0"], ["--timeout is `0.0`"]),
        (["--timeout", "inf"], ["--timeout is `inf`"]),
        (["--start-timeout", "nan"], ["--start-timeout is `nan`"]),
        (["--backend", "local", "--nproc", "2"], ["--backend local is one process", "--nproc is `2`"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith(("-", "t")) else "",
)
def test_an_option_that_can_not_be(arguments: list[str], wanted: list[str], cli: Cli, nothing: Path) -> None:
    quick = [word for pair in (FAST[:2], FAST[2:]) if pair[0] not in arguments for word in pair]
    others = [*quick, "--run-dir", str(nothing)]
    refused(cli(*arguments, *others) if arguments != ["--epochs"] else cli(*others, *arguments), *wanted, box=True)


def test_a_name_that_is_none(cli: Cli, nothing: Path) -> None:
    at = ["--run-dir", str(nothing)]
    refused(cli(*FAST, *at, "--model", "convnett"), "`convnett`", "convnet, or module:factory", "Did you mean convnet?")
    refused(cli(*FAST, *at, "--data", "digitz"), "`digitz`", "`digits`", "`fashion_mnist`", "Did you mean `digits`?")
    refused(cli(*FAST, *at, "--data", "imagenet"), "`imagenet`", "`digits`", "`fashion_mnist`")


MODELS = """
import torch
def no_module(num_classes): return "model"
def no_parameters(num_classes): return torch.nn.Flatten()
def two(num_classes, width): return torch.nn.Linear(num_classes, width)
number = 3
"""


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("nosuchmodule:factory", ["No module named 'nosuchmodule'", "module:factory"]),
        ("bad_models:nosuch", ["no attribute 'nosuch'"]),
        ("bad_models:", ["bad_models:"]),
        (":", ["`:`"]),
        ("bad_models:number", ["is a int, not a function"]),
        ("bad_models:no_module", ["made a str, not a torch.nn.Module"]),
        ("bad_models:no_parameters", ["bad_models:no_parameters", "parameter"]),
        ("bad_models:two", ["bad_models:two", "num_classes"]),
    ],
)
def test_a_model_that_can_not_be_built(
    name: str, wanted: list[str], cli: Cli, nothing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    refused(cli(*FAST, "--model", name, "--run-dir", str(nothing)), *wanted)


def test_batches_that_do_not_fit(cli: Cli, nothing: Path) -> None:
    at = [*FAST, "--run-dir", str(nothing)]
    refused(cli(*at, "--global-batch", "2", "--accumulate", "3"), "--global-batch is `2`", "1 rank", "at least 3")
    refused(cli(*at, "--global-batch", "1438"), "--global-batch is `1438`", "`1437` training samples", "smaller")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--device", "cuda"], ["--device is `cuda`", "no GPU", "--device cpu"]),
        (["--backend", "ddp", "--transport", "nccl"], ["--transport nccl", "--transport gloo"]),
        (["--backend", "horovod", "--transport", "nccl"], ["--transport nccl", "built with"]),
    ],
)
def test_what_this_machine_does_not_have(arguments: list[str], wanted: list[str], cli: Cli, nothing: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a machine with a GPU")
    refused(cli(*FAST, *arguments, "--run-dir", str(nothing)), *wanted)


def test_fp16_where_it_can_not_work(cli: Cli, nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch says it where a CPU has no such kernel; this one has."""
    original = torch.nn.Conv2d.forward

    def forward(self: torch.nn.Conv2d, inputs: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16:
            raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'\nsecond line")
        return original(self, inputs)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", forward)
    refused(cli(*FAST, "--precision", "fp16", "--run-dir", str(nothing)), "--precision fp16", "not implemented",
            "--precision bf16 or fp32")  # fmt: skip
    for name in ("fp32", "fp64", "bf16"):
        Precision(name, torch.device("cpu"))  # else the test would pass for any reason
    with pytest.raises(HvdDDPError):
        Precision("fp16", torch.device("cpu"))


# Data


def idx(*sizes: int, values: int = 10) -> bytes:
    """A whole IDX file of these sizes."""
    data = np.random.default_rng(0).integers(0, values, sizes, dtype=np.uint8)
    return struct.pack(f">BBBB{len(sizes)}I", 0, 0, 8, len(sizes), *sizes) + data.tobytes()


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    """The four files of a small Fashion-MNIST."""
    folder = tmp_path / "fashion"
    folder.mkdir()
    for part, num in (("train", 130), ("t10k", 20)):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(num, 28, 28, values=256))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(num))
    return folder


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def swap(folder: Path) -> None:
    images, labels = folder / IMAGES, folder / LABELS
    images.rename(folder / "x")
    labels.rename(images)
    (folder / "x").rename(labels)


def truncate(name: str, by: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-by]) and None


def replace(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


SPOILT: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "missing": (lambda folder: (folder / LABELS).unlink(), [f"lacks `{LABELS}`", "--data-dir"]),
    "all missing": (lambda folder: [path.unlink() for path in folder.iterdir()], ["lacks", IMAGES, LABELS]),
    "cut": (truncate(IMAGES, 1), [IMAGES, "cut short"]),
    "cut in the header": (replace(LABELS, b"\0\0\x08\x01\0"), [LABELS, "header"]),
    "empty": (replace(LABELS, b""), [LABELS]),
    "longer": (replace(LABELS, idx(130) + b"\0"), [LABELS, "goes on after"]),
    "swapped": (swap, [IMAGES, "swapped"]),
    "of two sets": (replace(LABELS, idx(129)), [IMAGES, LABELS, "`130`", "`129`"]),
    "labels too high": (replace(LABELS, idx(130, values=200)), [LABELS, "0 to 9"]),
    "another kind": (replace(IMAGES, b"PK\x03\x04" + b"x" * 500), [IMAGES, "504b0304"]),
    "cut gzip": (replace(LABELS, gzip.compress(idx(130))[:-9]), [LABELS, "can't be read"]),
    "a bomb": (replace(IMAGES, struct.pack(">BBBB3I", 0, 0, 8, 3, 2**31, 2**31, 2**31)), [IMAGES, "more than"]),
    "smaller than a batch": (lambda folder: small(folder), ["--global-batch is `64`", "`40` training samples"]),
}


def small(folder: Path) -> None:
    (folder / IMAGES).write_bytes(idx(40, 28, 28))
    (folder / LABELS).write_bytes(idx(40))


@pytest.mark.parametrize("kind", SPOILT)
def test_files_of_a_data_set(kind: str, fashion: Path, cli: Cli, nothing: Path) -> None:
    spoil, wanted = SPOILT[kind]
    spoil(fashion)
    before = snapshot(fashion)
    arguments = [*FAST, "--data", "fashion_mnist", "--data-dir", str(fashion), "--run-dir", str(nothing)]
    refused(cli(*arguments), *wanted)
    assert snapshot(fashion) == before


def test_whole_files_are_taken(fashion: Path, cli: Cli, tmp_path: Path) -> None:
    """Else the tests above pass for the wrong reason."""
    at = ["--data", "fashion_mnist", "--data-dir", str(fashion), "--run-dir", str(tmp_path / "fine")]
    assert cli(*FAST, *at).code == 0


def test_no_folder_of_data(cli: Cli, nothing: Path) -> None:
    refused(cli(*FAST, "--data", "fashion_mnist", "--run-dir", str(nothing)), "--data-dir DIR", "dataset-fashion-mnist")


# The file of options


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("lr: [", ["can't be read"]),
        ("\tlr: 1", ["can't be read"]),
        ("globl_batch: 3", ["`globl_batch`", "Did you mean global_batch?"]),
        ("zzzzzz: 3", ["`zzzzzz`", "global_batch"]),
        ("- lr", ["is a list"]),
        ("lr", ["is a str"]),
        ("7: 8", ["`7`"]),
        ("config: other.yaml", ["`config`"]),
        ("print_config: true", ["`print_config`"]),
        ("model: !!python/object/apply:os.system ['touch hacked']", ["can't be read"]),
        ("global_batch: many", ["global_batch", "many"]),
        ("global_batch: 1.5", ["global_batch", "1.5"]),
        ("global_batch: true", ["global_batch"]),
        ("lr: {a: 1}", ["lr", "is a dict"]),
        ("epochs: 0", ["--epochs is `0`"]),
        ("backend: hvd", ["backend", "'horovod'"]),
        ("find_unused_parameters: 3", ["find_unused_parameters", "3"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_of_options(content: str, wanted: list[str], cli: Cli, nothing: Path, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(content)
    result = cli("--config", str(path), *FAST, "--run-dir", str(nothing))
    refused(result, box="helptext" in result.err)
    said = words(result.err)
    for word in wanted:
        assert word.replace("_", "-") in said.replace("_", "-"), said


@pytest.mark.parametrize("kind", ["missing", "a folder", "bytes", "empty name"])
def test_no_file_of_options(kind: str, cli: Cli, nothing: Path, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00lr")
    path = {"missing": tmp_path / "nosuch.yaml", "a folder": tmp_path, "bytes": tmp_path / "bytes"}.get(kind, "")
    refused(cli(f"--config={path}", *FAST, "--run-dir", str(nothing)), "--config", "can't be read")


# Run directories


@pytest.mark.parametrize(
    "kind", ["a file in its place", "below a file", "/proc/hvd_ddp", "/dev/null/x", "too long", "a dangling link"]
)
def test_a_run_directory_that_can_not_be_written(kind: str, cli: Cli, tmp_path: Path) -> None:
    places = {
        "a file in its place": tmp_path / "file",
        "below a file": tmp_path / "file" / "runs" / "a",
        "too long": tmp_path / ("x" * 300),
        "a dangling link": tmp_path / "link" / "a",
    }
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("/proc/none")
    before = snapshot(tmp_path)
    place = places.get(kind, Path(kind))
    refused(cli(*FAST, "--run-dir", str(place)), f"`{place}`", "--run-dir")
    assert snapshot(tmp_path) == before


def spoil_init(tmp_path: Path) -> list[str]:
    torch.save({"layer.weight": torch.zeros(10, 64), "layer.bias": torch.zeros(10)}, tmp_path / "init.pt")
    return ["--init", str(tmp_path / "init.pt")]


# Field of TrainConfig -> options that give it another value than the run has, and both values.
FOREIGN: dict[str, tuple[list[str], str, str]] = {
    "data": (["--data", "fashion_mnist", "--data-dir", "FASHION"], "digits", "fashion_mnist"),
    "augment": (["--augment", "standard"], "none", "standard"),
    "model": (["--model", "factories:UnusedOnAll"], "factories:Small", "factories:UnusedOnAll"),
    "task": (["--task", "own_tasks:Good"], "classification", "own_tasks:Good"),
    "init": (["--init", "INIT"], "None", "init.pt"),
    "sync_bn": (["--sync-bn"], "False", "True"),
    "ema": (["--ema", "0.5"], "None", "0.5"),
    "global_batch": (["--global-batch", "32"], "64", "32"),
    "optimizer": (["--optimizer", "sgd"], "adam", "sgd"),
    "lr": (["--lr", "0.01"], "0.001", "0.01"),
    "momentum": (["--momentum", "0.5"], "0.9", "0.5"),
    "weight_decay": (["--weight-decay", "0.25"], "0.0", "0.25"),
    "schedule": (["--schedule", "cosine"], "constant", "cosine"),
    "warmup_steps": (["--warmup-steps", "1"], "0", "1"),
    "decay_every": (["--decay-every", "7"], "30", "7"),
    "decay_factor": (["--decay-factor", "0.5"], "0.1", "0.5"),
    "patience": (["--patience", "7"], "3", "7"),
    "clip_norm": (["--clip-norm", "2.5"], "None", "2.5"),
    "label_smoothing": (["--label-smoothing", "0.125"], "0.0", "0.125"),
    "precision": (["--precision", "fp64"], "fp32", "fp64"),
    "seed": (["--seed", "5"], "0", "5"),
    "compression": (["--compression", "fp16"], "none", "fp16"),
    "adasum": (["--adasum"], "False", "True"),
}


def test_every_field_that_may_not_change_is_tried() -> None:
    fixed = {field.name for field in dataclasses.fields(TrainConfig) if not may_change(field.name)}
    assert fixed == set(FOREIGN)


@pytest.mark.parametrize("field", FOREIGN)
def test_a_run_of_another_configuration(field: str, run_dir: Path, fashion: Path, cli: Cli, tmp_path: Path) -> None:
    options, was, now = FOREIGN[field]
    torch.save({"layer.weight": torch.zeros(10, 64), "layer.bias": torch.zeros(10)}, tmp_path / "init.pt")
    places = {"FASHION": str(fashion), "INIT": str(tmp_path / "init.pt")}
    before = snapshot(run_dir)
    result = cli(*SAME, "--run-dir", str(run_dir), *(places.get(option, option) for option in options))
    flag = field.replace("_", "-")
    refused(result, f"{field} `{was}`", f"--no-{flag}" if was == "False" else f"--{flag} {was}", "another --run-dir")
    assert re.search(rf"this run has `[^`]*{re.escape(now)}`", result.err), result.err
    assert snapshot(run_dir) == before


def test_a_start_that_died_before_its_first_checkpoint_is_a_run_as_well(run_dir: Path, cli: Cli) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    before = snapshot(run_dir)
    refused(cli(*SAME, "--seed", "5", "--run-dir", str(run_dir)), "seed `0`", "`5`", "another --run-dir")
    assert snapshot(run_dir) == before


def test_resume_never(run_dir: Path, cli: Cli) -> None:
    before = snapshot(run_dir)
    refused(cli(*SAME, "--resume", "never", "--run-dir", str(run_dir)), f"`{run_dir}`", "`never`", "--run-dir")
    assert snapshot(run_dir) == before


def test_resume_a_file_that_is_none(cli: Cli, nothing: Path, tmp_path: Path) -> None:
    at = [*SAME, "--run-dir", str(nothing)]
    refused(cli(*at, "--resume", str(tmp_path / "none.pt")), "none.pt", "no such file")
    refused(cli(*at, "--resume", str(tmp_path)), str(tmp_path))
    refused(cli(*at, "--resume", ""), "--resume")
    refused(cli(*at, "--resume", "allways"), "allways", "auto, never or a checkpoint")


def test_resume_a_file_that_is_no_checkpoint(cli: Cli, nothing: Path, tmp_path: Path) -> None:
    def with_hash(path: Path) -> str:
        path.with_name(path.name + ".sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest() + "\n")
        return str(path)

    text, weights = tmp_path / "text.pt", tmp_path / "weights.pt"
    text.write_text("hello")
    torch.save({"layer.weight": torch.zeros(10, 64), "layer.bias": torch.zeros(10)}, weights)
    at = [*SAME, "--run-dir", str(nothing)]
    refused(cli(*at, "--resume", str(text)), "text.pt", "hash")
    refused(cli(*at, "--resume", with_hash(text)), "text.pt")
    refused(cli(*at, "--resume", with_hash(weights)), "weights.pt", "--init")


def test_resume_a_file_that_would_run_code(cli: Cli, nothing: Path, tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "hacked"),)

    path = tmp_path / "attack.pt"
    torch.save({"model": Attack()}, path)
    path.with_name("attack.pt.sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    refused(cli(*SAME, "--run-dir", str(nothing), "--resume", str(path)), "attack.pt")
    refused(cli(*SAME, "--run-dir", str(nothing), "--init", str(path)), "attack.pt")
    assert not (tmp_path / "hacked").exists()


def test_resume_a_file_where_there_are_checkpoints(run_dir: Path, trained: Path, cli: Cli) -> None:
    other = trained / "checkpoints" / "step_00000002.pt"
    before = snapshot(run_dir)
    refused(cli(*SAME, "--resume", str(other), "--run-dir", str(run_dir)), "checkpoints of its own", "step_00000002.pt",
            "--resume", "--run-dir")  # fmt: skip
    assert snapshot(run_dir) == before


def test_fewer_steps_than_done(run_dir: Path, cli: Cli) -> None:
    before = snapshot(run_dir)
    arguments = [*SAME, "--run-dir", str(run_dir), "--max-steps", "1"]
    refused(cli(*arguments), "step 2", "end at step 1", "--max-steps")
    assert snapshot(run_dir) == before


def test_cosine_of_another_length(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "cosine"
    arguments = [*SAME, "--schedule", "cosine", "--run-dir", str(folder)]
    assert cli(*arguments).code == 0
    before = snapshot(folder)
    refused(cli(*arguments, "--max-steps", "3"), "step 2", "step 3", "--schedule cosine", "--init")
    assert snapshot(folder) == before
    assert "already finished" in cli(*arguments).out


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    beside = path.with_name(path.name + ".sha256")
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "a bit":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "no hash":
        beside.unlink()
    elif how == "empty hash":
        beside.write_text("")
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("how", ["cut", "a bit", "empty", "no hash", "empty hash", "a folder"])
def test_only_broken_checkpoints(how: str, run_dir: Path, cli: Cli) -> None:
    """Also with more to do, and also where the summary says that the run has finished."""
    damage(run_dir / "checkpoints" / "step_00000002.pt", how)
    before = snapshot(run_dir)
    for steps in ("2", "4"):
        refused(cli(*SAME, "--run-dir", str(run_dir), "--max-steps", steps), "step_00000002.pt", "none is whole",
                "--run-dir")  # fmt: skip
        assert snapshot(run_dir) == before


@pytest.mark.parametrize("content", ['{"restart": "two"}', '{"restart": null}', "[]", "{", "", '{"status": 3}'])
def test_a_summary_that_somebody_edited(content: str, run_dir: Path, cli: Cli) -> None:
    """It is for people and scripts; the checkpoint counts."""
    (run_dir / "summary.json").write_text(content)
    result = cli(*SAME, "--run-dir", str(run_dir), "--max-steps", "3")
    assert result.code in (0, 2), result.text
    assert "Traceback" not in result.text


def test_other_files_under_the_same_name(cli: Cli, fashion: Path, tmp_path: Path) -> None:
    """The data set has grown since: another order of samples, so another run; and nothing written."""
    folder = tmp_path / "fine"
    at = ["--data", "fashion_mnist", "--data-dir", str(fashion), "--run-dir", str(folder), "--threads", "1"]
    assert cli(*at, "--max-steps", "2").code == 0
    (fashion / IMAGES).write_bytes(idx(140, 28, 28, values=256))
    (fashion / LABELS).write_bytes(idx(140))
    before = snapshot(folder)
    refused(cli(*at, "--max-steps", "4"), "`130`", "`140`", "--run-dir")
    assert snapshot(folder) == before


def test_another_model_under_the_same_name(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module was edited since."""
    (tmp_path / "growing.py").write_text(
        "from torch.nn import Flatten, Linear, Sequential\n"
        "WIDTH = 8\n"
        "def net(n): return Sequential(Flatten(), Linear(64, WIDTH), Linear(WIDTH, n))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["--threads", "1", "--model", "growing:net", "--run-dir", str(tmp_path / "run")]
    assert cli(*arguments, "--max-steps", "2").code == 0
    monkeypatch.setattr(sys.modules["growing"], "WIDTH", 9)
    before = snapshot(tmp_path / "run")
    refused(cli(*arguments, "--max-steps", "4"), "step_00000002.pt", "growing:net")
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize("kind", ["missing", "a folder", "text", "other shapes", "other names", "a list"])
def test_weights_to_begin_with(kind: str, cli: Cli, nothing: Path, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    tensors = {
        "other shapes": {"layer.weight": torch.zeros(10, 63), "layer.bias": torch.zeros(10)},
        "other names": {"module.layer.weight": torch.zeros(10, 64), "module.layer.bias": torch.zeros(10)},
        "a list": [torch.zeros(3)],
    }
    if kind in tensors:
        torch.save(tensors[kind], path)
    elif kind == "text":
        path.write_text("hello")
    elif kind == "a folder":
        path.mkdir()
    refused(cli(*SAME, "--init", str(path), "--run-dir", str(nothing)), "weights.pt")


def test_a_job_that_is_alive(run_dir: Path, cli: Cli) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom hvd_ddp.job.launch import detect\n"
        "from hvd_ddp.lock import Lock\n"
        "Lock(Path(sys.argv[1]), detect(), timeout=300).acquire()\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(run_dir)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        before = {name: content for name, (content, _) in snapshot(run_dir).items()}  # the lock's time moves
        for more in ([], ["--max-steps", "4"], ["--resume", "never"]):
            refused(cli(*SAME, *more, "--run-dir", str(run_dir)), f"process {holder.pid}", socket.gethostname(),
                    "--run-dir")  # fmt: skip
        assert {name: content for name, (content, _) in snapshot(run_dir).items()} == before
    finally:
        holder.kill()
        holder.wait()
    assert cli(*SAME, "--max-steps", "4", "--run-dir", str(run_dir)).code == 0, "a dead one holds nobody up"


# As a user starts it: whole processes


def start(*arguments: str, timeout: float = 60, tests: bool = True, **extra: str) -> Result:
    """`python -m hvd_ddp ...` in a process of its own."""
    paths = f"{ROOT}:{ROOT / 'tests'}" if tests else str(ROOT)
    shims = extra.pop("shims", "")
    extra["PYTHONPATH"] = f"{shims}:{paths}" if shims else paths
    return run([sys.executable, "-m", "hvd_ddp", *arguments], timeout=timeout, **extra)


def test_a_process_of_its_own(nothing: Path) -> None:
    refused(start("--global-bach", "3", "--run-dir", str(nothing)), "--global-batch", box=True)
    refused(start(*FAST, "--model", "convnett", "--run-dir", str(nothing)), "Did you mean convnet?")


HIDDEN = """
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] == "horovod" else find(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
"""


def test_horovod_is_not_installed(nothing: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    for more in ([], ["--nproc", "2"]):
        result = start(*FAST, "--backend", "horovod", *more, "--run-dir", str(nothing), shims=str(tmp_path))
        refused(result, "not installed", "install-horovod", "--backend ddp")


@pytest.mark.parametrize(
    ("init", "record", "wanted"),
    [
        ("", '{"torch": "1.0.0"}', ["built for torch `1.0.0`", f"this is torch `{torch.__version__}`"]),
        ("raise ImportError('mpi_lib.so: undefined symbol: _ZN3c10')", "", ["does not load", "undefined symbol"]),
        ("import cloudpickle_is_missing", "", ["cloudpickle_is_missing"]),
    ],
    ids=["for another torch", "undefined symbol", "without a dependency"],
)
def test_horovod_is_spoilt(init: str, record: str, wanted: list[str], nothing: Path, tmp_path: Path) -> None:
    package = tmp_path / "horovod"
    (package / "torch").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "torch" / "__init__.py").write_text(init)
    if record:
        (package / "hvd_ddp_build.json").write_text(record)
    result = start(*FAST, "--backend", "horovod", "--run-dir", str(nothing), shims=str(tmp_path))
    refused(result, *wanted, "install-horovod")


def test_two_ranks_say_it_once(run_dir: Path, nothing: Path) -> None:
    at = ["--nproc", "2", "--threads", "1"]
    before = snapshot(run_dir)
    small_batch = ["--global-batch", "3", "--accumulate", "2", "--max-steps", "2", "--run-dir", str(nothing)]
    refused(start(*at, *small_batch), "--global-batch is `3`", "2 ranks", "--accumulate 2", "at least 4")
    refused(start(*at, *SAME, "--seed", "5", "--run-dir", str(run_dir)), "seed `0`", "`5`")
    refused(start(*at, *FAST, "--run-dir", "/dev/null/x"), "`/dev/null/x` can't be written")
    refused(start(*at, "--epochs", "0", "--run-dir", str(nothing)), "--epochs is `0`", box=True)
    assert snapshot(run_dir) == before


def of_ours(result: Result) -> Result:
    """Without what the launcher says of the ranks that left."""
    said = [line for line in result.err.splitlines() if line.startswith("hvd_ddp: ") or "helptext" in words(line)]
    code = 2 if result.code in (1, 2) else result.code  # torchrun makes 1 of it
    return Result(code, result.out, "\n".join(said) + "\n")


@pytest.mark.parametrize(
    ("launcher", "variables", "wanted"),
    [
        ("mpirun", {"WORLD_SIZE": "3"}, ["WORLD_SIZE is `3`", "openmpi says `2`"]),
        ("mpirun", {"RANK": "0", "WORLD_SIZE": "2"}, ["RANK is `0`", "openmpi says `1`"]),
        ("mpiexec.mpich", {"RANK": "7"}, ["RANK is `7`", "hydra says `0`"]),
        ("python", {"RANK": "1", "WORLD_SIZE": "2"}, ["RANK is `1`", "no launcher"]),
        ("--nproc", {"WORLD_SIZE": "2"}, ["WORLD_SIZE is `2`", "no launcher"]),
    ],
)
def test_rank_and_size_of_ones_own(launcher: str, variables: dict[str, str], wanted: list[str], nothing: Path) -> None:
    program = ["-m", "hvd_ddp", *FAST, "--run-dir", str(nothing)]
    result = run(command(launcher, 1 if launcher == "python" else 2, program), timeout=30, **variables)
    refused(of_ours(result), *wanted, "Unset RANK and WORLD_SIZE")


def test_ranks_that_start_ranks(nothing: Path) -> None:
    result = run(command("mpirun", 2, ["-m", "hvd_ddp", *FAST, "--nproc", "2", "--run-dir", str(nothing)]), timeout=30)
    refused(of_ours(result), "--nproc is `2`", "openmpi started `2` tasks", "Leave --nproc out")


def test_a_launcher_in_every_task_of_another(nothing: Path) -> None:
    inner = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", "hvd_ddp", *FAST]
    line = [str(BIN / "mpirun"), "-np", "2", "--oversubscribe", *inner, "--run-dir", str(nothing)]
    result = run(line, timeout=60)
    said = {line for line in result.err.splitlines() if line.startswith("hvd_ddp: ")}
    assert result.code != 0
    assert len(said) == 1, result.err  # each of the two worlds may have said it
    assert "openmpi started `2` tasks" in said.pop()


def test_horovod_sees_another_world(nothing: Path) -> None:
    program = ["-m", "hvd_ddp", *FAST, "--backend", "horovod", "--transport", "mpi", "--run-dir", str(nothing)]
    result = run(command("mpiexec.mpich", 2, program), timeout=60)
    refused(of_ours(result), "Horovod says rank `0` of `1`", "hydra started this as rank", "`2`", "--transport gloo")


@pytest.mark.parametrize(
    ("launcher", "wanted"),
    [
        ("--nproc", ["`torchrun` started these ranks, without MPI"]),
        ("horovodrun --gloo", ["`horovodrun` started these ranks, without MPI"]),
        ("mpiexec.mpich", ["mpi4py loads `Open MPI v", "hydra is of another MPI (MPICH)"]),
    ],
)
def test_ddp_over_an_mpi_that_did_not_start_the_ranks(launcher: str, wanted: list[str], nothing: Path) -> None:
    program = ["-m", "hvd_ddp", *FAST, "--backend", "ddp", "--transport", "mpi", "--run-dir", str(nothing)]
    result = run(command(launcher, 2, program), timeout=60)
    said = Result(2 if result.code else 0, "", re.sub(r"^\[\d+\]<stderr>:", "", result.err, flags=re.MULTILINE))
    refused(of_ours(said), "--transport mpi", *wanted, "each rank would be alone", "use --transport gloo")


@pytest.mark.parametrize("launcher", ["mpirun", "mpiexec.mpich", "horovodrun --gloo"])
def test_ranks_of_a_launcher_say_it_once_and_leave_together(launcher: str, nothing: Path) -> None:
    """Hydra, like srun, leaves the others alone when one has gone: none may wait for it."""
    program = ["-m", "hvd_ddp", *FAST, "--model", "convnett", "--run-dir", str(nothing)]
    result = run(command(launcher, 2, program), timeout=40)
    said = Result(2 if result.code else 0, "", re.sub(r"^\[\d+\]<stderr>:", "", result.err, flags=re.MULTILINE))
    refused(of_ours(said), "Did you mean convnet?")


@pytest.mark.parametrize(
    ("launcher", "line", "wanted"),
    [
        ("mpirun", ["--epochs", "0"], "--epochs is `0`"),
        ("mpiexec.mpich", ["--epochs", "0"], "--epochs is `0`"),
        ("mpiexec.mpich", ["--epochs", "many"], "invalid literal"),
        ("mpiexec.mpich", ["evaluate", "none", "--threads", "many"], "Error parsing --threads"),
    ],
)
def test_an_option_is_refused_once(launcher: str, line: list[str], wanted: str, nothing: Path) -> None:
    result = run(command(launcher, 2, ["-m", "hvd_ddp", *line]), timeout=30, cwd=nothing.parent)
    assert result.code == 2
    assert words(result.text).count(wanted) == 1, result.text


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (["--epochs", "0"], "--epochs is `0`"),
        (["--nproc", "2"], "--nproc is `2`"),
        (["--device", "cuda", "--run-dir", "NONE"], "--device is `cuda`"),
    ],
)
def test_it_is_said_also_where_rank_0_is_the_slowest(line: list[str], wanted: str, nothing: Path) -> None:
    """mpirun kills all when the first one has left: the others must not leave before it is said."""
    if torch.cuda.is_available() and "cuda" in line:
        pytest.skip("a machine with a GPU")
    (nothing.parent / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "class Slow:\n"
        "    delay = 0.7\n"
        "    def write(self, text):\n"
        "        time.sleep(self.delay)\n"
        "        self.delay = 0\n"
        "        return sys.__stderr__.write(text)\n"
        "    def __getattr__(self, name): return getattr(sys.__stderr__, name)\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK') == '0': sys.stderr = Slow()\n"
    )
    program = ["-m", "hvd_ddp", *(str(nothing) if word == "NONE" else word for word in line)]
    result = run(command("mpirun", 2, program), timeout=60, PYTHONPATH=f"{nothing.parent}:{ROOT}")
    assert result.code == 2
    assert words(result.text).count(wanted) == 1, result.text


@pytest.mark.parametrize("launcher", ["mpirun", "mpiexec.mpich"])
def test_nobody_waits_for_a_rank_0_that_can_not_write(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    program = ["-m", "hvd_ddp", *FAST, "--run-dir", str(tmp_path / "file")]
    result = run(command(launcher, 2, program), timeout=30)
    refused(of_ours(result), f"`{tmp_path / 'file'}` can't be written", "--run-dir")
    assert (tmp_path / "file").read_text() == "mine"


def test_no_process_is_left() -> None:
    """By any of the above: all were started as children of this one."""
    left = [child for child in psutil.Process().children(recursive=True) if "hvd_ddp" in child.cmdline()]
    assert left == []


def test_a_recipe_that_is_none(cli: Cli, nothing: Path) -> None:
    at = [*FAST, "--run-dir", str(nothing)]
    refused(
        cli("--config", "cifar10", *at), "neither a file nor one of the recipes: cifar100", "Did you mean cifar100?"
    )
    refused(cli("--config", "cifar100", *at), "Data set `cifar100` is read from files", "data prepare cifar100")


@pytest.mark.parametrize("name", ["cifar100", "fashion_mnist", "cifar10_resnet18", "imagenet_resnet50"])
def test_a_recipe(name: str, cli: Cli, tmp_path: Path) -> None:
    """A file of that name in the working directory comes first; the command line wins over both."""
    text = (ROOT / f"hvd_ddp/recipes/{name}.yaml").read_text()
    assert re.search("Not run|Reached", text)
    for line in (line for line in text.splitlines() if not line.startswith("#")):
        assert line in cli("--config", name, "--print-config").out
    assert "seed: 7" in cli("--config", name, "--seed", "7", "--print-config").out
    (tmp_path / "cwd" / name).write_text("seed: 8")
    assert "seed: 8" in cli("--config", name, "--print-config").out


def test_a_command_that_is_none(cli: Cli) -> None:
    commands = "train, evaluate, predict, data, bench, plot, doctor, parity, scaling, submit, launch, completion, "
    refused(cli("trian"), "`trian`", commands, "Did you mean train?")
    refused(cli("3"), "`3`", commands)


def test_nobody_reads_on() -> None:
    line = f"set -o pipefail; {sys.executable} -m hvd_ddp --help | head -1"
    result = run(["bash", "-c", line], timeout=30)
    assert "Traceback" not in result.text
    assert "BrokenPipe" not in result.text
