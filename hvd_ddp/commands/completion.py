"""completion: what a shell completes after `hvd-ddp`: commands, options, choices, and else files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from hvd_ddp.commands import COMMANDS
from hvd_ddp.commands.bench import BENCHES
from hvd_ddp.commands.options import command_line
from hvd_ddp.errors import FINISHED

# Bash cuts --backend=d into three words; what follows the -- of submit is for train.
SCRIPT = """# Completion of hvd-ddp, as `hvd-ddp completion` writes it.
_hvd_ddp() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} said='' words='' command i
    for ((i = 1; i < COMP_CWORD; i++)); do
        said+="${COMP_WORDS[i]} "
    done
    case $said in
%(commands)s        *) command=train ;;
    esac
    [[ $said != *" -- "* ]] || command=train
    [[ $before != = ]] || before=${COMP_WORDS[COMP_CWORD - 2]}
    [[ $word != = ]] || word=
    if [[ $word == -* ]]; then
        case $command in
%(options)s        esac
    elif [[ $COMP_CWORD == 1 ]]; then
        words="%(names)s"
    else
        case "$command $before" in
%(choices)s        esac
    fi
    # shellcheck disable=SC2207  # words without spaces; zsh has no mapfile
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o bashdefault -o default -F _hvd_ddp hvd-ddp
"""
ZSH = """(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
autoload -Uz bashcompinit && bashcompinit
"""


@dataclass(frozen=True)
class Options:
    """Write what completes `hvd-ddp` in a shell: commands, options, their choices, and where there are none files.

    For good: eval "$(hvd-ddp completion bash)" in ~/.bashrc, or the same with zsh in ~/.zshrc.
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh"]]
    """Shell that is to complete."""


def run(arguments: list[str]) -> int:
    """`python -m hvd_ddp completion`."""
    options = command_line(Options, arguments, "completion")
    print((ZSH if options.shell == "zsh" else "") + script(), end="")
    return FINISHED


def script() -> str:
    """For bash, and for zsh with its bashcompinit."""
    commands = kinds()
    choices: dict[str, list[str]] = {}  # by the command and the word before
    for name, kind in commands.items():
        above, _, below = name.rpartition(" ")
        if above:
            choices.setdefault(f"{above} {above}", []).append(below)
        for field, hint in get_type_hints(kind, include_extras=True).items():
            if words := _choices(hint):
                choices[f"{name} {name if _is_positional(hint) else _flag(field)}"] = words
    longest_first = sorted({*commands, *COMMANDS}, key=lambda name: (-name.count(" "), name))
    return SCRIPT % {
        "commands": _cases({f'"{name} "*': f'command="{name}"' for name in longest_first}, 8),
        "options": _cases({f'"{name}"': f'words="{" ".join(_flags(kind))}"' for name, kind in commands.items()}, 12),
        "names": " ".join(COMMANDS),
        "choices": _cases({f'"{key}"': f'words="{" ".join(words)}"' for key, words in choices.items()}, 12),
    }


def _cases(table: dict[str, str], indent: int) -> str:
    return "".join(f"{' ' * indent}{pattern}) {then} ;;\n" for pattern, then in table.items())


def kinds() -> dict[str, type]:
    """The options of each command, such as `train`, and of those under one, such as `bench step`."""
    found: dict[str, type] = {}
    for name, module in {**COMMANDS, **{f"bench {bench}": module for bench, module in BENCHES.items()}}.items():
        options: Any = getattr(import_module(module), "Options", {})  # of `bench` there are none
        parts = options if isinstance(options, Mapping) else {"": options}
        found |= {f"{name} {part}".strip(): kind for part, kind in parts.items()}
    return found


def _flags(kind: type) -> list[str]:
    flags = ["--help"]
    for field, hint in get_type_hints(kind, include_extras=True).items():
        if not _is_positional(hint):
            flags += [_flag(field), *([_flag(f"no-{field}")] if hint is bool else [])]
    return flags


def _choices(hint: Any) -> list[str]:
    """The words that an option can be, as far as they are known."""
    if get_origin(hint) is Literal:
        return [word for word in get_args(hint) if isinstance(word, str)]
    return [word for part in get_args(hint) for word in _choices(part)]


def _is_positional(hint: Any) -> bool:
    return get_origin(hint) is Annotated


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
