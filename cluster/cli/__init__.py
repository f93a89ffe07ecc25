"""The command line: one module per verb. It alone composes all four folders."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from cluster.cli import (
    bake,
    bench,
    down,
    extend,
    fetch,
    iam_policy,
    images,
    jobs,
    local,
    overview,
    predict,
    report,
    run,
    scaling,
    ssh,
    stacks,
    status,
    train,
    tune,
    up,
    verify,
)
from cluster.cli.common import Parser
from infra.errors import SprError, UsageError

_DESCRIPTION = """\
Train on a cluster of AWS Sapphire Rapids machines, from your laptop:

  spr-cluster up --nodes 4        buy, install, connect and verify the nodes
  spr-cluster train squad         fine-tune DistilBERT on SQuAD over all of them
  spr-cluster down                give everything back, and prove it

The same with no account and no cost, in containers on this machine (Linux, root):

  spr-cluster up --nodes 2 --cloud local
"""
_EPILOG = "exit codes: 0 done, 1 it failed, 2 it was asked for wrongly, 130 interrupted by Ctrl-C"
_POSITIONAL = {"file", "folder", "job", "node", "time"}
_VERBS = (
    up,
    verify,
    train,
    run,
    bench,
    tune,
    scaling,
    jobs,
    fetch,
    report,
    predict,
    status,
    ssh,
    extend,
    down,
    overview,
    stacks,
    bake,
    images,
    iam_policy,
    local,
)


def build_parser() -> argparse.ArgumentParser:
    """Every verb with its options. Builds in milliseconds: verbs import what they need when they run."""
    parser = Parser(
        prog="spr-cluster",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for verb in _VERBS:
        verb.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.version:
        from importlib.metadata import version

        print(f"spr-cluster {version('spr-cluster')}")
        return 0
    if "run" not in args:
        parser.print_help()
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        _refuse_empty(args)
        return int(args.run(args))
    except KeyboardInterrupt as interrupt:
        # A second Ctrl-C, while what exists was being listed, ends here, too.
        print("\ninterrupted", file=sys.stderr)
        _leave_at_once(143 if isinstance(interrupt, _TerminatedError) else 130)
    except BrokenPipeError:
        _leave_at_once(1)
    except Exception as error:
        translated = _translate(error)
        if translated is None:
            raise
        return _report(translated)
    return 0


def _refuse_empty(args: argparse.Namespace) -> None:
    """An empty value is most often a shell variable that is not set: it must not mean the default."""
    for key, value in vars(args).items():
        if value == "":
            name = key if key in _POSITIONAL else f"--{key.replace('_', '-')}"
            raise UsageError(f"{name} is empty", hint="give it a value, or leave it out")


def _translate(error: Exception) -> SprError | None:
    """An error as a message for the user; ``None`` for a bug."""
    if isinstance(error, SprError):
        return error
    if isinstance(error, OSError) and error.filename is not None:
        return SprError(
            f"{error.filename}: {error.strerror}",
            hint="does it exist, is there room, and may this user use it? "
            "SPR_CLUSTER_HOME says where this tool keeps its files",
        )
    from infra.clients import translate_boto_error

    return translate_boto_error(error)


class _TerminatedError(KeyboardInterrupt):
    """Somebody wants this process to end: treated as Ctrl-C, with SIGTERM's exit code."""


def _end(_number: int, _frame: object) -> None:
    raise _TerminatedError


def _report(error: SprError) -> int:
    print(f"spr-cluster: {error}", file=sys.stderr)
    return error.exit_code


def _leave_at_once(code: int) -> None:
    """End without waiting for threads that still wait for machines."""
    sys.stderr.flush()
    os._exit(code)
