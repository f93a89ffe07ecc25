"""Commands on jobs, and the command line's entry point, which imports only the command that was asked for."""

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

from cluster.cli import GROUPS as CLUSTER_GROUPS
from cluster.console.output import say
from cluster.console.parser import Command, HelpFormatter, Parser
from infra.aws.api_time import API_TIME
from infra.errors import HangupError, SprError, UsageError

_JOBS = {
    "train": Command("jobs.cli.train", "train on all nodes"),
    "run": Command("jobs.cli.run", "run any program on all nodes"),
    "jobs": Command("jobs.cli.jobs", "list a cluster's jobs: queued, running, and ended"),
    "top": Command("jobs.cli.top", "watch nodes, ranks, and the queue live"),
    "attach": Command("jobs.cli.attach", "follow a job, and fetch its results at its end"),
    "logs": Command("jobs.cli.jobs", "print the log of a job or of one rank"),
    "wait": Command("jobs.cli.attach", "wait until a job ends"),
    "cancel": Command("jobs.cli.jobs", "end a job on all nodes"),
    "fetch": Command("jobs.cli.results.fetch", "download a job's model, log, and results"),
    "report": Command("jobs.cli.results.report", "write a one-page report of a run"),
    "predict": Command("jobs.cli.results.predict", "answer questions with a trained model"),
    "bench": Command("jobs.cli.bench", "measure every node and name slow ones"),
    "tune": Command("jobs.cli.tune", "find the fastest placement of a training job"),
    "scaling": Command("jobs.cli.tune", "measure a training job on more and more nodes"),
    "k8s": Command("jobs.cli.elsewhere.k8s", "the same training job on Kubernetes"),
    "render": Command(
        "jobs.cli.elsewhere.render", "the same training job as YAML or a Slurm script"
    ),
}
GROUPS = {
    "cluster": CLUSTER_GROUPS["cluster"],
    "jobs": _JOBS,
    "software": CLUSTER_GROUPS["software"],
    "upkeep": CLUSTER_GROUPS["upkeep"]
    | {"completion": Command("jobs.cli.completion", "print a completion script for your shell")},
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
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
_POSITIONAL = {"cluster", "file", "folder", "job", "node", "time"}


def _render_commands() -> str:
    """Return the list of commands by group, as ``--help`` shows it."""
    parts = []
    for group, commands in GROUPS.items():
        rows = [f"  {name:<11} {each.help}" for name, each in commands.items() if each.help]
        parts.append("\n".join([f"{group}:", *rows]))
    return "\n\n".join(parts)


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser, with the options of one command; without one, only what ``--help`` needs."""
    parser = Parser(
        prog="spr-cluster",
        usage="spr-cluster COMMAND [options]",
        description=_DESCRIPTION,
        epilog=f"{_render_commands()}\n\n{_EPILOG}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    if command is not None:
        subparsers = parser.add_subparsers(
            metavar="COMMAND", help=argparse.SUPPRESS, prog="spr-cluster"
        )
        import_module(COMMANDS[command].module).add_parser(subparsers)
    return parser


# What other tools call it.
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
        # Names and records can contain bytes that are not valid text.
        sys.stdout.reconfigure(errors="backslashreplace")
    if "_ARGCOMPLETE" in os.environ:
        import_module("jobs.cli.completion").complete()
    if command is not None and command not in COMMANDS:
        near = [_SYNONYMS[command]] if command in _SYNONYMS else []
        near = near or difflib.get_close_matches(command, COMMANDS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        build_parser().error(f"unknown command {command!r}{meant}")
    parser = build_parser(command)
    args = parser.parse_args(words)
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
        # A second Ctrl-C, while existing resources were being listed, arrives here, too.
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


def _refuse_empty(args: argparse.Namespace) -> None:
    """An empty value is usually an unset shell variable: it must not mean the default."""
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
    # `nohup` has it ignored.
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
        except OSError:  # A closed terminal: what is printed from now on must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    raise HangupError


def _report(error: SprError) -> int:
    say(f"spr-cluster: {error}")
    return error.exit_code


def _exit_at_once(code: int) -> None:
    """Exit without waiting for threads that still wait for machines."""
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)
