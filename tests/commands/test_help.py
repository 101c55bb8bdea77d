"""--help: each group fits a screen, and each option says what it is, its unit and its default."""

import re
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
from launchers import Result

from hvd_ddp.commands import COMMANDS
from hvd_ddp.commands.completion import kinds
from hvd_ddp.commands.options import groups_of, texts
from hvd_ddp.config import GROUPS, TrainConfig

Cli = Callable[..., Result]
WIDTH, HEIGHT = 100, 40
KINDS = kinds()
UNITS = re.compile(
    r"\b(seconds|milliseconds|minutes|MiB|bytes|ranks|hosts|cores|threads|processes|samples|images|pictures|batches|"
    r"micro-batches|steps|epochs|passes|evaluations|checkpoints|turns|runs)\b",
    re.IGNORECASE,
)
NUMBERS = {"ema", "lr", "momentum", "weight_decay", "decay_factor", "clip_norm", "label_smoothing", "seed", "tolerance"}


def numeric(hint: Any) -> bool:
    return hint in (int, float) or any(numeric(part) for part in get_args(hint))


@pytest.fixture
def text(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """What a command says on a screen of 100 columns."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))

    def ask(name: str) -> str:
        result = cli(*name.split(), "--help")
        assert result.code == 0 and not result.err, result.text
        return result.out

    return ask


@pytest.mark.parametrize("name", KINDS)
def test_each_group_fits_a_screen(name: str, text: Callable[[str], str]) -> None:
    lines = text(name).splitlines()
    assert max(len(line) for line in lines if not line.startswith("usage: ")) <= WIDTH
    starts = [number for number, line in enumerate(lines) if line.startswith("╭")]
    for start, end in zip([0, *starts], [*starts, len(lines)], strict=True):
        assert end - start <= HEIGHT, lines[start]
    titles = [lines[start].strip("╭─╮ ") for start in starts]
    wanted = [f"{group} options" for group in GROUPS] if issubclass(KINDS[name], TrainConfig) else []
    assert [title for title in titles if title not in ("options", "positional arguments")] == wanted


@pytest.mark.parametrize("name", KINDS)
def test_each_option_says_what_it_is(name: str, text: Callable[[str], str]) -> None:
    kind = KINDS[name]
    about, hints = texts(kind), get_type_hints(kind)
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", text(name)).split())
    for field in groups_of(kind):
        said = about[field.name]
        assert said.endswith("."), said
        after = words[words.index(said) + len(said) :]
        assert after.startswith((" (default: ", " (required)")), (field.name, after[:30])
        if numeric(hints[field.name]):
            assert UNITS.search(said) or field.name in NUMBERS, f"{field.name} has no unit: {said}"


@pytest.mark.parametrize("name", [*COMMANDS, "bench", "data"])
def test_every_command_has_help(name: str, text: Callable[[str], str]) -> None:
    assert f"hvd_ddp {name}" in text(name) or name == "train"
    assert name in text("train"), "the first help that one reads names all commands"


def test_numbers_are_those_without_a_unit() -> None:
    hints = [(name, hint) for kind in KINDS.values() for name, hint in get_type_hints(kind).items()]
    assert {name for name, hint in hints if numeric(hint)} >= NUMBERS
