"""What anybody may have left or sent: each fault that fuzzing has found once, and secrets and rights of files."""

import json
import os
import stat
import struct
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz import test_checkpoints as states
from fuzz import test_data, test_run_directory
from launchers import Result, command, run
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from hvd_ddp import assemble, checkpoint, models, outside, resume
from hvd_ddp.config import TrainConfig
from hvd_ddp.data import image_folder, packed
from hvd_ddp.durable import open_own
from hvd_ddp.ema import Average
from hvd_ddp.errors import HvdDDPError
from hvd_ddp.job.handshake import Connection, check_hello
from hvd_ddp.optim import load

Cli = Callable[..., Result]
HEX, RAW = b"54" * 32, b"T" * 32


# Files


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("kind", [pipe, endless, folder], ids=lambda kind: kind.__name__)
def test_only_regular_files_are_read_and_written(kind: Any, tmp_path: Path) -> None:
    kind(tmp_path / "x")
    for work in (outside.read, outside.open_regular, lambda path: open_own(path, os.O_WRONLY | os.O_CREAT)):
        with pytest.raises(OSError):
            work(tmp_path / "x")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """metrics.jsonl, a log or a failure that another has made a link to a file of the user's."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "x").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError):
        open_own(tmp_path / "x", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    assert outside.read(tmp_path / "x") == b"mine"  # reading may: data often lies elsewhere


def test_only_so_much_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x" * 11)
    assert outside.read(tmp_path / "x", 11) == b"x" * 11
    with pytest.raises(OSError, match="too large"):
        outside.read(tmp_path / "x", 10)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{", b"\xff", b"9" * 5000])
def test_json_raises_one_kind_of_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        outside.from_json(text)


@pytest.mark.parametrize("text", [b"- " * 3000, b"a: 2001-99-99", b"\xff", b"a: " + b"9" * 5000, b"a: !!int ''"])
def test_yaml_raises_one_kind_of_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        outside.from_yaml(text)


def test_a_list_that_grows_by_aliases_is_no_option(cli: Cli) -> None:
    """Twelve lines of it are 9**12 words."""
    from fuzz.test_options import LAUGHS

    Path("x.yaml").write_text("data: &a0 [lol]\nmodel: " + LAUGHS.splitlines()[1].partition(": ")[2])
    result = cli("train", "--config", "x.yaml")
    assert result.code == 2
    assert "data is a list. Write one value." in result.err


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_of_a_run_are_readable_as_umask_says(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        test_run_directory.start(tmp_path / "run")
        packed.write(test_data.datasets.find(test_data.NAME).read(None), tmp_path / "a.packed", sources={})
    finally:
        os.umask(before)
    found = [*(tmp_path / "run").rglob("*"), *(tmp_path / "a.packed").rglob("*")]
    assert len(found) >= 15, found
    for path in found:
        wanted = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == wanted & ~umask, path


@pytest.mark.parametrize("data", ["../../x:y", "/x/y:z"])
def test_no_name_leads_out_of_runs(data: str) -> None:
    launch = test_run_directory.LAUNCH
    for one in (launch.__class__(**{**launch.__dict__, "scheduler_job": None}),
                launch.__class__(**{**launch.__dict__, "scheduler_job": "../../x"})):  # fmt: skip
        directory = resume.default_directory(TrainConfig(data=data, model="../m:n"), one)
        assert directory.parent == Path("runs")
        assert directory.name not in ("", ".", "..")


# Checkpoints with a hash that fits


def bomb(name: str) -> bytes:
    if name == "deflated":
        return states.deflated(1 << 24)
    if name == "bytes of any number":
        return states.reduced(b"builtins\nbytearray", states.NUMBER)
    if name == "overlapping":
        buffer = BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("archive/data.pkl", b"\x80\x02}.")
        whole = bytearray(buffer.getvalue())
        size = whole.index(b"PK\x01\x02") + 24
        whole[size : size + 4] = struct.pack("<I", 1 << 30)  # the entry says that it holds a gigabyte
        return bytes(whole)
    if name == "expanded":
        return states.as_file({"w": torch.zeros(1).expand(10**12)})
    return states.as_file({"w": torch.empty(3, device="meta")})


@pytest.mark.parametrize("name", ["deflated", "bytes of any number", "overlapping", "expanded", "without content"])
def test_a_checkpoint_takes_no_more_memory_than_its_file(name: str) -> None:
    with pytest.raises(HvdDDPError, match="nothing else is loaded"):
        checkpoint.parse(bomb(name), "x.pt")


def test_a_checkpoint_runs_no_code_that_is_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration names model and data, and `os:system` takes a data_dir."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("my_models_.py").write_text("from os import system\nclass Net:\n    pass\n")
    for name in (
        "os:system",
        "subprocess:run",
        "torch:load",
        "builtins:exec",
        "hvd_ddp.main:main",
        "my_models_:system",
    ):
        assert not models.is_own_code(name), name
    assert models.is_own_code("my_models_:Net")


@pytest.mark.parametrize("option", ["data", "model", "task"])
def test_evaluate_refuses_code_of_a_checkpoint_unless_it_is_asked_for(option: str, cli: Cli) -> None:
    config = states.valid()["config"] | {option: "os:system", "data_dir": "touch pwned"}
    path = states.store(Path("."), states.as_file({**states.valid(), "config": config}))
    result = cli("evaluate", str(path))
    assert result.code == 2
    assert f"names `os:system` as its {option}" in result.err
    assert f"--{option} os:system" in result.err
    assert not Path("pwned").exists()


CHANGES: list[tuple[str, Any]] = [
    ("progress", {"step": "1", "updates": 1}), ("progress", {"step": -1, "updates": -1}), ("total_steps", None),
    ("progress", {"step": 1, "updates": 1, "evaluated_at": torch.zeros(2)}), ("place", {"epoch": "x"}),
    ("decisions", {"best": {"step": "x"}, "stale": 0}), ("decisions", [1]),
    ("decisions", None), ("ema", None),
    ("data", {"num_samples": torch.zeros(2)}), ("data", {}), ("config", {"data": [1]}), ("data", 3),
    ("scaler", {"scale": "x"}), ("optimizer", {"state": [], "param_groups": []}), ("model", [1]), ("ema", {"w": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_each_field_is_what_train_writes(name: str, value: Any, tmp_path: Path) -> None:
    states.store(tmp_path, states.as_file({**states.valid(), name: value}))
    with pytest.raises(HvdDDPError, match=f"holds no `{name}`"):
        states.go_on(tmp_path)


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    return {"param_groups": optimizer.state_dict()["param_groups"], "state": optimizer.state_dict()["state"]}


@pytest.mark.parametrize("kind", [Adam, SGD])
def test_the_state_of_an_optimizer_fits_its_parameters(kind: type[Optimizer]) -> None:
    model = nn.Linear(3, 2)
    extra = {"momentum": 0.9} if kind is SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **extra)  # type: ignore[arg-type]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    load(optimizer, state_of(optimizer))
    good = state_of(optimizer)
    name = "momentum_buffer" if kind is SGD else "exp_avg"
    bad = [
        good | {"state": {0: {**good["state"][0], name: torch.zeros(5)}}},
        good | {"state": {0: {**good["state"][0], name: "x"}}},
        good | {"state": {0: {**good["state"][0], name: torch.zeros(2, 3, dtype=torch.bool)}}},
        good | {"state": {0: {"other": torch.zeros(())}}},
        good | {"state": {9: good["state"][0]}},
        good | {"param_groups": []},
        good | {"param_groups": [good["param_groups"][0] | {"weight_decay": 1.0}]},
    ]
    if kind is Adam:  # 1 - beta**0 is what it would divide by
        bad += [good | {"state": {0: good["state"][0] | {"step": torch.tensor(-1.0)}}}]
        bad += [good | {"state": {0: good["state"][0] | {"exp_avg": None}}}]
    for state in bad:
        with pytest.raises(ValueError):
            load(optimizer, state)


def test_the_average_fits_its_parameters() -> None:
    """Else one number is spread over all of them."""
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="shape"):
        Average(model, 0.9).load_state_dict({name: torch.zeros(1) for name, _ in model.named_parameters()})


def test_what_torch_keeps_beside_weights_is_not_used(tmp_path: Path) -> None:
    """`assign_to_params_buffers` would give the model parameters that the optimizer does not have."""
    state = states.valid()
    weights = type(state["model"])(state["model"])
    weights._metadata = {"": {"assign_to_params_buffers": True}, "1": {"assign_to_params_buffers": True}}
    states.store(tmp_path, states.as_file({**state, "model": weights}))
    one = states.trainer(tmp_path)
    before = [parameter.data_ptr() for parameter in one.model.parameters()]
    one.load_state_dict(checkpoint.parse(checkpoint.verified(checkpoint.of_step(tmp_path / "checkpoints", 1)), "x"))
    assert [parameter.data_ptr() for parameter in one.model.parameters()] == before


def test_weights_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pt")
    with pytest.raises(HvdDDPError, match="can't be read"):
        assemble.read_weights(tmp_path / "x.pt")


# Data


def test_a_picture_starts_no_program(tmp_path: Path) -> None:
    """Pillow gives PostScript to Ghostscript, whatever the file is called."""
    for part in ("train", "val"):
        (tmp_path / part / "c").mkdir(parents=True)
        (tmp_path / part / "c" / "x.jpg").write_bytes(test_data.POSTSCRIPT)
    data = image_folder._open("image_folder:8", 8, tmp_path, image_folder._list(tmp_path))
    with pytest.raises(image_folder.UnreadableError, match="UnidentifiedImageError"):
        data.train.read(0, 0, augment=False)  # type: ignore[union-attr]


def test_a_pipe_among_pictures_is_none(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part / "c").mkdir(parents=True)
        (tmp_path / part / "c" / "x.png").write_bytes(test_data.pictures()["PNG"])
    os.mkfifo(tmp_path / "train" / "c" / "y.jpg")
    (tmp_path / "train" / "c" / "z.jpg").symlink_to("/dev/zero")
    assert image_folder._pictures(tmp_path / "train" / "c") == ["x.png"]


@pytest.mark.parametrize("names", test_data.OUTWARDS)
def test_no_picture_outside_is_named(names: bytes, tmp_path: Path) -> None:
    found = json.dumps(test_data.SURVEY).encode() + b"\n" + names
    with pytest.raises(HvdDDPError, match="makes no sense"):
        image_folder._open("image_folder:8", 8, tmp_path, found)


# Secrets


def test_a_connection_does_not_show_its_token() -> None:
    assert "TTT" not in repr(Connection(None, RAW, b"n" * 16))  # type: ignore[arg-type]


def test_the_token_of_a_job_shows_nowhere(tmp_path: Path) -> None:
    """Neither in what two ranks write and print, one of which fails, nor in their environment or command line."""
    (tmp_path / "spies.py").write_text(
        "import os\nfrom pathlib import Path\nfrom torch import nn\nfrom hvd_ddp.job.launch import detect\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(64, num_classes)\n"
        "        self.forwards = 0\n"
        "        proc = Path('/proc/self')\n"
        "        child = os.popen('cat /proc/self/environ').read().encode(errors='surrogateescape')\n"
        "        seen = (proc / 'environ').read_bytes() + (proc / 'cmdline').read_bytes() + child\n"
        "        Path(f'seen-{os.getpid()}').write_bytes(seen)\n"
        "    def forward(self, x):\n"
        "        self.forwards += 1\n"
        "        if self.forwards == 3 and detect().rank == 1:\n"
        "            raise RuntimeError('the sensor is on fire')\n"
        "        return self.layer(x.flatten(1))\n"
    )
    (tmp_path / "program.py").write_text(
        "import secrets, sys\nreal = secrets.token_bytes\n"
        "secrets.token_bytes = lambda n=None: b'T' * 32 if n == 32 else real(n)\n"
        "sys.path.insert(0, '.')\nfrom hvd_ddp.main import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    options = ["train", "--model", "spies:Net", "--max-steps", "9", "--threads", "1", "--run-dir", "run"]
    result = run(command("mpirun", 2, ["program.py", *options]), cwd=tmp_path)
    assert result.code == 1
    assert "the sensor is on fire" in result.err
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "program.py"]
    assert len([path for path in files if path.name.startswith("seen-")]) == 2
    assert (tmp_path / "run" / "failures" / "0" / "rank_0001.json") in files
    for text in [*(path.read_bytes() for path in files), result.text.encode()]:
        assert HEX not in text
        assert RAW not in text
        assert repr(RAW)[2:-1].encode() not in text


# What ranks say


HELLO = {"rank": 1, "world_size": 2, "host": "b", "process": [1, 2.0], "node_rank": None, "cores": 1, "error": None}


@pytest.mark.parametrize(
    "change",
    [{"rank": "1"}, {"rank": 1e999}, {"world_size": None}, {"host": 3}, {"host": "\x1b[31m"}, {"process": [1]},
     {"process": "12"}, {"node_rank": -1}, {"cores": 0}, {"cores": 10**30}, {"error": ["x"]}],
)  # fmt: skip
def test_a_rank_says_what_ranks_say(change: dict[str, Any]) -> None:
    assert check_hello(HELLO) == HELLO
    with pytest.raises(ValueError):
        check_hello(HELLO | change)
    for name in HELLO:
        with pytest.raises(ValueError):
            check_hello({key: value for key, value in HELLO.items() if key != name})


class Own(torch.optim.Optimizer):
    """A user's own, whose state is a number and a part of the parameter's shape."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["rows"] = parameter.grad.sum(-1)


def test_the_state_of_a_users_own_optimizer_is_taken_as_it_is() -> None:
    """Adafactor, Lion and the like keep what torch's own do not."""
    layer = torch.nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    first, second = Own(layer.parameters()), Own(layer.parameters())
    first.step()
    load(second, first.state_dict())
    assert second.state[layer.weight]["step"] == 1
    assert torch.equal(second.state[layer.weight]["rows"], first.state[layer.weight]["rows"])
