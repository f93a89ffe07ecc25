"""The command line: the table of all commands, the parser, which imports only the requested one, and a
command from its words to its result. The Python API is another client."""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cluster.cli import GROUPS as CLUSTER_GROUPS
from cluster.console.options import Option
from cluster.console.output import allow_questions, say
from cluster.console.parser import Command, Parser
from infra.aws.api_time import API_TIME
from infra.aws.outage import OUTAGE
from infra.errors import HangupError, SprError, UsageError
from infra.version import read_version
from infra.words import nearest

if TYPE_CHECKING:
    from jobs.cli.shared.project_options import CommandWords

_JOBS = {
    "train": Command("jobs.cli.train", "train on all nodes"),
    "run": Command("jobs.cli.run", "run any program on all nodes"),
    "jobs": Command("jobs.cli.jobs", "list a cluster's jobs: queued, running, and ended"),
    "top": Command("jobs.cli.top", "watch nodes, ranks, and the queue live"),
    "attach": Command("jobs.cli.attach", "follow a job, and fetch its results at its end"),
    "logs": Command("jobs.cli.logs", "print the log of a job or of one rank"),
    "wait": Command("jobs.cli.attach", "wait until a job ends"),
    "cancel": Command("jobs.cli.jobs", "end a job on all nodes"),
    "fetch": Command("jobs.cli.results.fetch", "download a job's model, log, and results"),
    "report": Command("jobs.cli.results.report", "write a one-page report of a run"),
    "predict": Command("jobs.cli.results.predict", "use a trained model on texts or a file"),
    "export": Command(
        "jobs.cli.results.export", "make a trained model faster, with a measured loss"
    ),
    "serve": Command("jobs.cli.results.serve", "serve a trained model over HTTP, here"),
    "bench": Command("jobs.cli.bench", "measure every node and name slow ones"),
}
GROUPS = {
    "cluster": CLUSTER_GROUPS["cluster"],
    "jobs": _JOBS,
    "software": {
        "stacks": CLUSTER_GROUPS["software"]["stacks"],
        "bake": Command("jobs.cli.bake", "make an image ahead of time, so `up` installs nothing"),
        "images": CLUSTER_GROUPS["software"]["images"],
    },
    "upkeep": CLUSTER_GROUPS["upkeep"]
    | {
        "config": Command(
            "jobs.cli.setup.config", "show or write spr-cluster.toml, and what it sets"
        ),
        "docs": Command("jobs.cli.setup.docs", "print a guide for agents and scripts"),
        "completion": Command(
            "jobs.cli.setup.completion", "print a completion script for your shell"
        ),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
# Names that other tools use.
_SYNONYMS = {
    "help": "--help",
    **dict.fromkeys(("create", "launch", "start"), "up"),
    **dict.fromkeys(("delete", "destroy", "stop", "terminate"), "down"),
    **dict.fromkeys(("ls", "clusters"), "list"),
    **dict.fromkeys(("ps", "queue"), "jobs"),
    **dict.fromkeys(("exec", "login"), "ssh"),
}
SHORT_FORMS: Mapping[str, tuple[str, ...]] = {
    "study": ("train",),
    "tune": ("train", "--tune=placement"),
    "scaling": ("train", "--tune=nodes"),
    "doctor": ("up", "--check"),
}
"""Names of a command with options."""
_SHORT_HELP = {
    "study": """\
`study` is `train` with `--tune`: it trains many trials, and keeps the best model.

  spr-cluster study squad --tune epochs=1..3
  spr-cluster study squad --tune learning-rate=1e-5..1e-3:log --trials 20
""",
    "tune": """\
`tune` is `train --tune placement`: it finds the fastest placement of ranks.

  spr-cluster tune squad
  spr-cluster tune classify --data train.csv
""",
    "scaling": """\
`scaling` is `train --tune nodes`: it compares the speed of 1, 2, 4, … nodes.

  spr-cluster scaling squad
  spr-cluster scaling classify --data train.csv
""",
    "doctor": """\
`doctor` is `up --check`: it checks, for free, whether `up` would succeed.

  spr-cluster doctor --nodes 4
  spr-cluster doctor --cloud local
""",
}
"""What `--help` says first of a short form; the rest is the command's own."""
_SHOWN = {
    "jobs": (1, "study", "train many trials with other options: train --tune"),
    "upkeep": (4, "doctor", "check whether `up` would succeed, for free: up --check"),
}
"""Short forms that `--help` lists, by group, and their places there."""
_VALUE = re.compile(r"(--env[= \0][^=\0 ]+)=[^\0]*")
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""A full disk, which Python reports without the file."""
_DESCRIPTION = """\
Train on a cluster of AWS Sapphire Rapids machines, from your laptop:

  spr-cluster up --nodes 4        create, install, connect, and verify the nodes
  spr-cluster train squad         fine-tune DistilBERT on SQuAD on all of them
  spr-cluster down                remove everything, and verify that it is gone

The same without an account and at no cost, in containers on this machine (Linux, root):

  spr-cluster up --nodes 2 --cloud local
"""
_EPILOG = """\
`spr-cluster COMMAND --help` shows a command's options and examples.
Exit codes: 0 done, 1 failed, 2 usage error and nothing changed, 130 interrupted by Ctrl-C,
129 terminal closed."""


def _render_commands() -> str:
    """Return the list of commands by group, as ``--help`` shows it."""
    parts = []
    for group, commands in GROUPS.items():
        rows = [f"  {name:<11} {each.help}" for name, each in commands.items()]
        place, name, text = _SHOWN.get(group, (0, "", ""))
        if name:
            rows.insert(place, f"  {name:<11} {text}")
        parts.append("\n".join([f"{group}:", *rows]))
    return "\n\n".join(parts)


def build_parser(command: str | None = None) -> Parser:
    """Return the parser with one command's options; without a command, only what ``--help`` needs."""
    parser = Parser(
        "spr-cluster",
        usage="spr-cluster COMMAND [options]",
        description=_DESCRIPTION,
        epilog=f"{_render_commands()}\n\n{_EPILOG}",
    )
    parser.add(
        [Option("version", "print the version and exit", ("--version",), takes=0, const=True)]
    )
    if command is not None:
        import_module(COMMANDS[command].module).add_parser(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # A third of a short command's time would be the search for garbage among what it imports.
    gc.set_threshold(500_000)
    atexit.register(gc.freeze)
    _replace_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names and records can contain invalid text.
        sys.stdout.reconfigure(errors="backslashreplace")
    if "_ARGCOMPLETE" in os.environ:
        import_module("jobs.cli.setup.completion").complete()
    try:
        code = _describe(words) if not words or words[0].startswith("-") else _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as interrupt:
        # A second Ctrl-C, during the list of existing resources, also arrives here.
        with suppress(OSError):
            say("\ninterrupted")
        _exit_at_once(getattr(interrupt, "exit_code", 130))
    except BrokenPipeError:
        _exit_at_once(1)
    except (SprError, OSError) as error:
        known = _translate(error)
        if known is None:
            raise
        say(f"spr-cluster: {known}")
        try:
            sys.stdout.flush()
        except OSError:  # Python would complain at its end
            _exit_at_once(known.exit_code)
        return known.exit_code


def _replace_closed_streams() -> None:
    """Open what a shell closed, such as with ``2>&-``: `print` would write errors to stdout instead."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = Path(os.devnull).open(mode, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            setattr(sys, name, null)


def _run(words: Sequence[str]) -> int:
    _handle_signals()
    allow_questions()
    return invoke(words)


def _describe(words: Sequence[str]) -> int:
    """Print the version, or the list of commands."""
    parser = build_parser()
    if "version" in parser.parse_args(words):
        print(f"spr-cluster {read_version()}")
        return 0
    parser.print_help()
    return 2


class TerminatedError(KeyboardInterrupt):
    """SIGTERM: treated like Ctrl-C."""

    exit_code = 143


def _handle_signals() -> None:
    signal.signal(signal.SIGTERM, _terminate)
    # Under `nohup`, it is ignored.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _hang_up)


def _terminate(_number: int, _frame: object) -> None:
    raise TerminatedError


def _hang_up(_number: int, _frame: object) -> None:
    # Both the shell and the kernel send one.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:  # A closed terminal: further output must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    raise HangupError


def _exit_at_once(code: int) -> NoReturn:
    """Exit without joining threads that still wait for machines."""
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def invoke(words: Sequence[str], sink: Callable[[object], None] | None = None) -> int:
    """Run a command, such as ``up --nodes 4``, with the options of ``spr-cluster.toml``.

    Returns its exit code. Prints its result, unless a ``sink`` takes what ``--json`` would print.
    Raises :class:`SprError`; other exceptions are bugs, or a closed pipe.
    """
    name, words = words[0], expand(words)
    if name in SHORT_FORMS and {"-h", "--help", "--advanced"} & {*words}:
        print(_SHORT_HELP[name])
    found = _add_project(words)
    with found.explaining():
        for word in found.words:  # from Python or a project file; no program can be given it
            if "\0" in word:
                raise UsageError(f"{word.partition('=')[0]!r}: a null character in it or its value")
        # A hint may repeat the words, but never a variable's value.
        extra: dict[str, Any] = {"words": (*_VALUE.sub(r"\1", "\0".join(words)).split("\0"),)}
        extra |= {"sink": sink, "json": True} if sink is not None else {}
        parser, request = build_parser(found.words[0]).parse(found.words, **extra)
        if name == "study" and not request.tune and request.resume is None:
            hint = f"{parser.prog.replace(' train ', ' study ')} --help"
            raise UsageError("a study needs --tune NAME=VALUES", hint=hint)
        API_TIME.on_offset = OUTAGE.on_wait = say
        try:
            return parser.run(request)
        except Exception as error:
            translated = _translate(error)
            if translated is None or translated is error:
                raise
            raise translated from error


def expand(words: Sequence[str]) -> list[str]:
    """Return a command line with the command that a short form stands for."""
    command, *more = SHORT_FORMS.get(words[0], words[:1])
    return [command, *words[1:], *more]


def _add_project(words: Sequence[str]) -> CommandWords:
    """Return the words with the options in ``spr-cluster.toml``."""
    if words[0] not in COMMANDS:
        known = _SYNONYMS.get(words[0])
        near = nearest(words[0], [*COMMANDS, *SHORT_FORMS])
        meant = f"; did you mean {known}?" if known else near
        build_parser().error(f"unknown command {words[0]!r}{meant}")
    file = import_module("infra.project_file").read_project_file()
    found: CommandWords = import_module("jobs.cli.shared.project_options").apply_project(
        words, file
    )
    if found.origins and file.path.is_absolute():
        say(f"options from {file.path}")
    return found


def _translate(error: Exception) -> SprError | None:
    """Return an error as a message for the user; ``None`` for a bug."""
    if isinstance(error, SprError):
        return error
    if isinstance(error, EOFError):
        # Such as botocore's question for an MFA code.
        return UsageError("a question needs an answer, but there is no terminal")
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _FULL):
        return SprError(
            f"{error.filename or 'a file or the output'}: {error.strerror}",
            hint="does it exist, is there space, and may this user access it? "
            "SPR_CLUSTER_HOME sets where this tool keeps its files",
        )
    # A command that calls AWS has imported it already.
    translated: SprError | None = import_module("infra.aws.clients").translate_boto_error(error)
    return translated
