"""``spr-cluster completion``: shell completion for commands, options, and existing names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import argcomplete
from argcomplete.completers import FilesCompleter, SuppressCompleter
from argcomplete.shell_integration import shellcode

from cluster.console.options import Option, Request, argument
from cluster.console.parser import Parser, add_request
from cluster.local_files import cluster_names
from infra.instance_types import INSTANCE_TYPES
from jobs.cli import COMMANDS, SHORT_FORMS, build_parser
from jobs.places.plan import own_folder
from provision.stacks.load import stack_names

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(Request):
    """Print a script that completes commands, options, and the names of clusters, jobs, stacks,
    and instance types in your shell.

    examples:
      eval "$(spr-cluster completion bash)"      in ~/.bashrc
      eval "$(spr-cluster completion zsh)"       in ~/.zshrc, after compinit
      spr-cluster completion fish > ~/.config/fish/completions/spr-cluster.fish
    """

    shell: str = argument("the shell that you use", choices=SHELLS)


def add_parser(parent: Parser) -> None:
    add_request(parent, "completion", run, CompletionRequest)


def run(request: CompletionRequest) -> int:
    print(shellcode(["spr-cluster"], shell=request.shell))
    return 0


def complete() -> None:
    """Print the completions that the shell requests through the environment, and exit."""
    line = os.environ.get("COMP_LINE", "")
    _, name, *rest = [*re.split(r"\s+", line.lstrip()), ""]
    if rest[1:] and name in SHORT_FORMS:
        command = SHORT_FORMS[name][0]
        os.environ["COMP_LINE"] = re.sub(rf"^(\s*\S+\s+){name}", rf"\g<1>{command}", line)
        longer = len(command) - len(name)
        os.environ["COMP_POINT"] = str(int(os.environ["COMP_POINT"]) + longer)
        name = command
    is_known = name in COMMANDS
    parser = build_parser(name if is_known else None)
    if not is_known:
        for known in (*(each for each, command in COMMANDS.items() if command.help), *SHORT_FORMS):
            parser.add_child(known, "", "")
    for each in parser.walk():
        for option in each.options:
            if completer := _find_completer(option):
                setattr(each.actions[option.name], "completer", completer)  # noqa: B010 - argcomplete's
    argcomplete.autocomplete(parser, default_completer=SuppressCompleter())


def _find_completer(option: Option) -> Callable[..., Iterable[str]] | None:
    """Return the completer of existing names, or of files, for an option."""
    names = _COMPLETERS.get(option.name)
    if names is not None and not option.choices:
        # A list such as `--instance-type a,b` completes its last entry.
        return lambda prefix, **_: [prefix[: prefix.rfind(",") + 1] + name for name in names()]
    is_path = option.name in _PATHS or "PATH" in (option.metavar or "")
    return FilesCompleter() if is_path else None


def _job_names() -> list[str]:
    return [
        path.parts[-3] for path in Path("results").glob(str(own_folder(Path("*")) / "job.json"))
    ]


_PATHS = {"results", "folder", "file", "run_qa", "data", "eval", "chat_template"}
_COMPLETERS: dict[str, Callable[[], Iterable[str]]] = {
    "name": cluster_names,
    "cluster": cluster_names,
    "stack": stack_names,
    "stacks": stack_names,
    "instance_types": lambda: INSTANCE_TYPES,
    "job": _job_names,
    "resume": _job_names,
}
