"""The options of a command: fields of a dataclass, each with the text under it, in groups that fit a screen."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, TypeVar, Union, get_type_hints

import tyro

from hvd_ddp.config import GROUPS, TrainConfig

T = TypeVar("T")
INDENT = "  "  # of a description: where the text in tyro's boxes begins


def command_line(
    kind: type[T] | Mapping[str, type[T]],
    arguments: Sequence[str],
    name: str = "",
    *,
    description: str | None = None,
    show_errors: bool = True,
) -> T:
    """What the arguments of command `name` say, which has options of this kind, or subcommands with one each.

    Exits with 2 where they can't be so, and says why; with 0 after --help.
    """
    # tyro itself is silent about all but what can't be the value of an option.
    with contextlib.nullcontext() if show_errors else contextlib.redirect_stderr(io.StringIO()):
        parsed: Any = tyro.cli(
            _subcommands(kind) if isinstance(kind, Mapping) else _grouped(kind),
            args=arguments,
            prog=f"python -m hvd_ddp {name}".strip(),
            description=None if isinstance(kind, Mapping) else wrapped(description or kind.__doc__ or ""),
            config=(tyro.conf.OmitArgPrefixes,),
            console_outputs=show_errors,
        )
    made: T = parsed.made
    return made


def wrapped(description: str) -> str:
    """As wide as the terminal. tyro makes one line of a paragraph, but for lines that begin with a space."""
    paragraphs = [" ".join(part.split()) for part in description.split("\n\n")]
    width = max(shutil.get_terminal_size().columns - len(INDENT), 20)
    return "\n\n".join(textwrap.indent(textwrap.fill(part, width), INDENT) for part in paragraphs)


def _subcommands(kinds: Mapping[str, type]) -> Any:
    told = [Annotated[_grouped(kind), tyro.conf.subcommand(name, prefix_name=False)] for name, kind in kinds.items()]
    return Union[tuple(told)]  # noqa: UP007  (made of what is known at run time alone)


def _grouped(kind: type) -> type:
    """For tyro: a dataclass whose parts are the groups of --help, and whose `made` is of this kind."""
    hints, about = get_type_hints(kind, include_extras=True), texts(kind)
    groups: dict[str, list[tuple[str, Any, Any]]] = {"": []}
    for field, group in groups_of(kind).items():
        hint = "(default: none)" if field.default == () else None
        told = tyro.conf.arg(help=about[field.name], help_behavior_hint=hint)
        plain = dataclasses.field(default=field.default)
        groups.setdefault(group, []).append((field.name, Annotated[hints[field.name], told], plain))
    parts = {name: dataclasses.make_dataclass(name, fields) for name, fields in groups.items() if name}

    def make(self: Any) -> None:
        values = {name: getattr(self, name) for name, _, _ in groups[""]}
        for name in parts:
            values |= vars(getattr(self, name))
        self.made = kind(**values)

    fields: list[Any] = [*parts.items(), *groups[""]]
    return dataclasses.make_dataclass(
        kind.__name__, fields, namespace={"__doc__": kind.__doc__, "__post_init__": make}, kw_only=True
    )


def groups_of(kind: type) -> dict[dataclasses.Field[Any], str]:
    """Each field and its group: of the options of train what GROUPS says, of a command's own none."""
    starts = {first: name for name, first in GROUPS.items()}
    theirs = {field.name for field in dataclasses.fields(TrainConfig)}
    found, group = {}, ""
    for field in dataclasses.fields(kind):
        group = starts.get(field.name, group)
        found[field] = group if issubclass(kind, TrainConfig) and field.name in theirs else ""
    return found


def texts(kind: type) -> dict[str, str]:
    """The text under each field, as one line."""
    found = {}
    for cls in reversed(kind.__mro__[:-1]):
        module = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
        (definition,) = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
        for field, text in pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found[name] = " ".join(words.split())
    return found
