"""One command from its words to its result. The command line and the Python API are its clients."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from cluster.console.output import say
from infra.aws.api_time import API_TIME
from infra.errors import SprError, UsageError
from jobs.cli import COMMANDS, build_parser

if TYPE_CHECKING:
    from jobs.cli.shared.project_options import CommandWords

_POSITIONAL = {"cluster", "file", "folder", "job", "node", "time"}
# Names that other tools use.
_SYNONYMS = {
    "help": "--help",
    **dict.fromkeys(("create", "launch", "start"), "up"),
    **dict.fromkeys(("delete", "destroy", "stop", "terminate"), "down"),
    **dict.fromkeys(("ls", "clusters"), "list"),
    **dict.fromkeys(("ps", "queue"), "jobs"),
    **dict.fromkeys(("exec", "login"), "ssh"),
}
# Former commands, and the places that replace them.
_FORMER = {"k8s": "kubernetes-yaml", "render": "kubernetes-yaml, or --to slurm-script"}
_VALUE = re.compile(r"(--env[= ][^=]+)=.*", re.DOTALL)


def invoke(words: Sequence[str], sink: Callable[[object], None] | None = None) -> int:
    """Run a command, such as ``up --nodes 4``, with the options of ``spr-cluster.toml``.

    Returns its exit code. Prints its result, unless a ``sink`` takes what ``--json`` would print.
    Raises :class:`SprError`; other exceptions are bugs, or a closed pipe.
    """
    found = _add_project(words)
    with found.explaining():
        args = build_parser(found.words[0]).parse_args(found.words)
        if sink is not None:
            args.sink, args.json = sink, True
        # A hint may repeat them, but never a variable's value.
        args.words = [*_without_values(words)]
        API_TIME.on_offset = say
        try:
            _refuse_empty(args)
            return int(args.run(args))
        except Exception as error:
            translated = _translate(error)
            if translated is None or translated is error:
                raise
            raise translated from error


def _without_values(words: Sequence[str]) -> Iterator[str]:
    """Yield a command's words; of ``--env NAME=VALUE``, only the name."""
    for before, word in zip(("", *words), words, strict=False):
        is_value = before == "--env"
        text = _VALUE.sub(r"\1", f"--env {word}" if is_value else word)
        yield text.removeprefix("--env ") if is_value else text


def _add_project(words: Sequence[str]) -> CommandWords:
    """Return the words with the options in ``spr-cluster.toml``."""
    if words[0] in _FORMER:
        raise UsageError(f"{words[0]!r} is now spr-cluster train TASK --to {_FORMER[words[0]]}")
    if words[0] not in COMMANDS:
        near = [_SYNONYMS[words[0]]] if words[0] in _SYNONYMS else []
        near = near or difflib.get_close_matches(words[0], COMMANDS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        build_parser().error(f"unknown command {words[0]!r}{meant}")
    options = import_module("jobs.cli.shared.project_options")
    project = import_module("infra.project_file")
    found: CommandWords = options.CommandWords([*words])
    if words[0] in options.READERS and project.find_project_file().exists():
        file = project.read_project_file()
        found = options.apply_project(words, file, build_parser)
        if found.origins and file.path.is_absolute():
            say(f"options from {file.path}")
    return found


def _refuse_empty(args: argparse.Namespace) -> None:
    """Refuse an empty value: it is usually an unset shell variable and must not mean the default."""
    for key, value in vars(args).items():
        if value == "":
            name = key if key in _POSITIONAL else f"--{key.replace('_', '-')}"
            raise UsageError(f"{name} is empty", hint="give it a value, or omit it")


def _translate(error: Exception) -> SprError | None:
    """Return an error as a message for the user; ``None`` for a bug."""
    if isinstance(error, SprError):
        return error
    if isinstance(error, EOFError):
        # Such as botocore's question for an MFA code.
        return UsageError("a question needs an answer, but there is no terminal")
    if isinstance(error, OSError) and error.filename is not None:
        return SprError(
            f"{error.filename}: {error.strerror}",
            hint="does it exist, is there space, and may this user access it? "
            "SPR_CLUSTER_HOME sets where this tool keeps its files",
        )
    # A command that calls AWS has imported it already.
    translated: SprError | None = import_module("infra.aws.clients").translate_boto_error(error)
    return translated
