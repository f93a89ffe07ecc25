"""The command line's entry point: ``spr-cluster``, or ``python -m jobs``."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version

from cluster.console.output import say
from cluster.console.parser import Parser
from infra.aws.api_time import API_TIME
from infra.errors import HangupError, SprError, UsageError
from jobs.cli import COMMANDS, build_parser

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words and not words[0].startswith("-") else None
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names and records can contain invalid text.
        sys.stdout.reconfigure(errors="backslashreplace")
    if "_ARGCOMPLETE" in os.environ:
        import_module("jobs.cli.setup.completion").complete()
    if command is not None and command not in COMMANDS:
        near = [_SYNONYMS[command]] if command in _SYNONYMS else []
        near = near or difflib.get_close_matches(command, COMMANDS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        build_parser().error(f"unknown command {command!r}{meant}")
    parser, full = build_parser(command), words
    Parser.explain = staticmethod(str)
    if command is not None:
        try:
            full = _add_project(words)
        except SprError as error:
            return _report(error)
    args = parser.parse_args(full)
    args.words = words
    if args.version:
        print(f"spr-cluster {version('spr-cluster')}")
        return 0
    if "run" not in args:
        parser.print_help()
        return 2
    _handle_signals()
    API_TIME.on_offset = say
    try:
        _refuse_empty(args)
        return int(args.run(args))
    except KeyboardInterrupt as interrupt:
        # A second Ctrl-C, during the list of existing resources, also arrives here.
        with suppress(OSError):
            say("\ninterrupted")
        _exit_at_once(getattr(interrupt, "exit_code", 130))
    except BrokenPipeError:
        _exit_at_once(1)
    except Exception as error:
        translated = _translate(error)
        if translated is None:
            raise
        return _report(translated)
    return 0


def _add_project(words: list[str]) -> list[str]:
    """Return the words with the options in ``spr-cluster.toml``; messages name the file's lines."""
    options = import_module("jobs.cli.shared.project_options")
    project = import_module("infra.project_file")
    if words[0] not in options.READERS or not project.find_project_file().exists():
        return words
    file = project.read_project_file()
    found = options.apply_project(words, file, build_parser)
    if found.origins and file.path.is_absolute():
        say(f"options from {file.path}")
    Parser.explain = staticmethod(found.explain)
    return list(found.words)


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


def _report(error: SprError) -> int:
    if isinstance(error, UsageError):
        error.message = Parser.explain(error.message)
    say(f"spr-cluster: {error}")
    return error.exit_code


def _exit_at_once(code: int) -> None:
    """Exit without joining threads that still wait for machines."""
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
