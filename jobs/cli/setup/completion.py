"""``spr-cluster completion``: shell completion for commands, options, and existing names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import argcomplete
from argcomplete.completers import FilesCompleter, SuppressCompleter
from argcomplete.shell_integration import shellcode

from cluster.console.parser import SubParsers, add_command
from cluster.local_files import cluster_names
from infra.instance_types import INSTANCE_TYPES
from jobs.cli import COMMANDS, build_parser
from jobs.launchers.plan import own_folder
from provision.stacks.load import stack_names

SHELLS = ("bash", "zsh", "fish")
_EXAMPLES = """\
  eval "$(spr-cluster completion bash)"      in ~/.bashrc
  eval "$(spr-cluster completion zsh)"       in ~/.zshrc, after compinit
  spr-cluster completion fish > ~/.config/fish/completions/spr-cluster.fish
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "completion",
        "Print a script that completes commands, options, and the names of clusters, jobs, stacks,\n"
        "and instance types in your shell.",
        _EXAMPLES,
        run=run,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that you use")


def run(args: argparse.Namespace) -> int:
    print(shellcode(["spr-cluster"], shell=args.shell))
    return 0


def complete() -> None:
    """Print the completions that the shell requests through the environment, and exit."""
    words = os.environ.get("COMP_LINE", "").split()
    command = words[1] if len(words) > 1 and words[1] in COMMANDS else None
    parser = build_parser(command)
    if command is None:
        subparsers = parser.add_subparsers()
        for name in [name for name, each in COMMANDS.items() if each.help]:
            subparsers.add_parser(name)
    else:
        _add_completers(parser)
    argcomplete.autocomplete(parser, default_completer=SuppressCompleter())


def _add_completers(parser: argparse.ArgumentParser) -> None:
    """Attach completers of existing names to the options of every subcommand."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _add_completers(child)
            continue
        names = _COMPLETERS.get(action.dest)
        if names is not None and not action.choices:
            setattr(action, "completer", _completer(names))  # noqa: B010 - argcomplete's own attribute
        elif action.dest in _PATHS or (action.metavar and "PATH" in str(action.metavar)):
            setattr(action, "completer", FilesCompleter())  # noqa: B010


def _completer(names: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    def complete_name(prefix: str, **_: Any) -> list[str]:
        # A list such as `--instance-type a,b` completes its last entry.
        head, comma, _last = prefix.rpartition(",")
        return [f"{head}{comma}{name}" for name in names()]

    return complete_name


def _job_names() -> list[str]:
    return [
        path.parts[-3] for path in Path("results").glob(str(own_folder(Path("*")) / "job.json"))
    ]


_PATHS = {"results", "folder", "file", "run_qa", "data", "eval"}
_COMPLETERS: dict[str, Callable[[], Iterable[str]]] = {
    "name": cluster_names,
    "cluster": cluster_names,
    "stack": stack_names,
    "stacks": stack_names,
    "instance_type": lambda: INSTANCE_TYPES,
    "job": _job_names,
    "resume": _job_names,
}
