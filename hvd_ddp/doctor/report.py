"""What a rank found, as it travels; and all findings of all ranks as few lines for a person, or JSON for a program."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hvd_ddp.doctor.check import WORST, Check, Status

DIFFERENT = {"ok": 2, "warning": 4, "failure": 8}  # lines of one check that may differ, before the rest is counted
FEW_HOSTS = 3  # that are named beside ranks
WIDTH = 120  # letters of a line that goes to a file
NAMES = ("ways between hosts", "all_reduce horovod")  # the longest
COLOURS = {"ok": "green", "warning": "yellow", "failure": "bold red"}


@dataclass(frozen=True)
class Report:
    """All that one rank found."""

    checks: list[Check]
    versions: dict[str, str]
    facts: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """What JSON can carry."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Report:
        """The inverse."""
        return Report([Check(**check) for check in values["checks"]], values["versions"], values["facts"])


@dataclass(frozen=True)
class Line:
    """Checks that say the same, and whose they are."""

    status: Status
    name: str
    detail: str
    remedy: str
    ranks: str


def lines(checks: Iterable[Check], hosts: list[str]) -> list[Line]:
    """Equal checks as one line; of those that differ in their detail alone the first few, and how many more.

    `hosts`: one a rank.
    """
    alike: dict[tuple[str, Status, str], dict[str, list[int | None]]] = {}
    for check in checks:
        details = alike.setdefault((check.name, check.status, check.remedy), {})
        details.setdefault(check.detail, []).append(check.rank)
    found = []
    for (name, status, remedy), details in alike.items():
        shown = list(details.items())[: DIFFERENT[status]]
        found += [Line(status, name, detail, remedy, _whose(ranks, hosts)) for detail, ranks in shown[:-1]]
        detail, ranks = shown[-1]
        more = len(details) - len(shown)
        also = f" (and {more} more like this)" if more else ""
        found.append(Line(status, name, detail + also, remedy, _whose(ranks, hosts)))
    return found


def _whose(ranks: list[int | None], hosts: list[str]) -> str:
    known = sorted({rank for rank in ranks if rank is not None})
    if not known or len(hosts) == 1:
        return ""
    on = list(dict.fromkeys(hosts[rank] for rank in known))
    where = f" on {', '.join(on)}" if len(on) <= FEW_HOSTS and len(set(hosts)) > 1 else ""
    return "all ranks" if len(known) == len(hosts) else ranks_in_words(known) + where


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-7,9`."""
    from ClusterShell.RangeSet import RangeSet

    known = list(ranks)
    return f"rank{'s' if len(known) > 1 else ''} {RangeSet.fromone(known[0]) if len(known) == 1 else _fold(known)}"


def _fold(ranks: list[int]) -> str:
    from ClusterShell.RangeSet import RangeSet

    folded = RangeSet()
    for rank in ranks:
        folded.add(rank)
    return str(folded)


def worst(checks: Iterable[Check]) -> Status:
    """The worst of all."""
    return max((check.status for check in checks), key=WORST.index, default="ok")


def to_json(checks: list[Check]) -> str:
    """One object, a check of each rank by itself."""
    return json.dumps({"checks": [asdict(check) for check in checks]})


def show(checks: list[Check], hosts: list[str], *, plain: bool) -> None:
    """Print lines: status, name, detail, whose it is; below it the remedy. `plain`: for a file."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=max(map(len, WORST)))
    table.add_column(no_wrap=True, min_width=max(map(len, NAMES)))
    table.add_column(overflow="fold")
    for line in lines(checks, hosts):
        whose = f"  [{line.ranks}]" if line.ranks else ""
        what = Text(line.detail).append(whose, style="dim")
        if line.remedy and line.status != "ok":
            what.append(f"\n-> {line.remedy}")
        table.add_row(Text(line.status, style=COLOURS[line.status]), line.name, what)
    style = {"width": WIDTH, "color_system": None} if plain else {}
    console = Console(highlight=False, emoji=False, **style)  # type: ignore[arg-type]
    with console.capture() as shown:
        console.print(table)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in shown.get().splitlines()))
    sys.stdout.flush()


def summary(checks: list[Check], hosts: list[str]) -> str:
    """How many lines of each kind."""
    found = [line.status for line in lines(checks, hosts)]
    numbers = {status: found.count(status) for status in WORST}
    words = {"ok": "ok", "warning": "warnings", "failure": "failures"}
    return ", ".join(f"{number} {words[status]}" for status, number in numbers.items() if number)
