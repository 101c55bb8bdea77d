"""Options: command lines, YAML files given with --config."""

from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from fuzz.guard import fuzz
from fuzz.mutations import changed, put, scalars, spoilt, strange, values
from hvd_ddp.commands.train import parse
from hvd_ddp.config import TrainConfig

VALID = TrainConfig(run_dir=Path("runs/a"), max_steps=5, nproc=2, ema=0.9, clip_norm=1.0).to_dict()
SHORT = {name: VALID[name] for name in ("data", "run_dir", "epochs", "lr", "threads", "skip_bad", "save_every")}
LAUGHS = "\n".join(["a0: &a0 [lol]", *(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(12))])
SEEDS = [
    b"", b"- a", b"1", b"data: [", b"data: " + b"[" * 3000, b"data:\n" + b"- " * 3000, b"seed: " + b"9" * 5000,
    b"data: 2001-99-99", b"data: 2001-01-01", b"? [a, b]\n: c", b"data: !!python/object/apply:os.system [id]",
    b"data: &a [*a]", b"data: !!binary aGFsbG8", b"data: !!set {a, b}", b"data: &a {x: *a}", b"<<: 1", b"\xff",
    b"\0", b"data: \x85", b"%YAML 9.9\n---\na: b", b"a: b\n---\nc: d", b"run_dir: \"a\\0b\"", b"seed: 0x" + b"f" * 99,
    b"lr: 1:2:3:4:5.5", b"lr: .nan", b"lr: 1e999", b"threads: true", b"nproc: no", b"1: 2", b"null: 3", b"~: 1",
    b"[a]: 1", b"data: " + b"x" * 3_000_000, LAUGHS.encode() + b"\ndata: *a12", b"data: \"\\ud800\"",
    b"config: other.yaml", b"print_config: true", b"data: --help", b"data: ''", b"run_dir: ''",
]  # fmt: skip


def as_yaml(value: Any) -> bytes:
    try:
        return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).encode(errors="surrogatepass")
    except yaml.YAMLError:
        return b""


@fuzz(
    30,
    SEEDS,
    content=st.one_of(
        changed(SHORT, st.one_of(scalars, values)).map(as_yaml),
        changed(VALID, scalars).map(as_yaml),
        spoilt(as_yaml(SHORT)),
        strange,
    ),
)
def test_yaml(folder: Path, content: Any) -> None:
    path = folder / "inside" / "options.yaml"
    put(path, content, folder)
    parse(["--config", str(path)], show_errors=False).to_dict()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


words = st.one_of(scalars.map(str), st.sampled_from(["--", "-h", "--config", "--config=", "--nproc", "=", "@x"]))
arguments = st.one_of(
    st.builds(lambda name, value: [f"{flag(name)}={value}"], st.sampled_from(sorted(VALID)), words),
    st.builds(lambda name, value: [flag(name), value], st.sampled_from(sorted(VALID)), words),
    words.map(lambda word: [word]),
)


@fuzz(40, lines=st.lists(arguments, min_size=1, max_size=3))
def test_command_line(folder: Path, lines: list[list[str]]) -> None:
    line = [word for words in lines for word in words]
    if not any(word.endswith(("-h", "--help")) for word in line):  # which exit with 0
        parse(line, show_errors=False).to_dict()
