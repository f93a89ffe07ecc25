"""The command line's entry point: ``spr-cluster``, or ``python -m jobs``."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version

from cluster.console.output import allow_questions, say
from infra.errors import HangupError, SprError
from jobs.cli import build_parser
from jobs.invoke import invoke


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names and records can contain invalid text.
        sys.stdout.reconfigure(errors="backslashreplace")
    if "_ARGCOMPLETE" in os.environ:
        import_module("jobs.cli.setup.completion").complete()
    try:
        if not words or words[0].startswith("-"):
            return _describe(words)
        _handle_signals()
        allow_questions()
        return invoke(words)
    except KeyboardInterrupt as interrupt:
        # A second Ctrl-C, during the list of existing resources, also arrives here.
        with suppress(OSError):
            say("\ninterrupted")
        _exit_at_once(getattr(interrupt, "exit_code", 130))
    except BrokenPipeError:
        _exit_at_once(1)
    except SprError as error:
        say(f"spr-cluster: {error}")
        return error.exit_code
    return 0


def _describe(words: Sequence[str]) -> int:
    """Print the version, or the list of commands."""
    parser = build_parser()
    if "version" in parser.parse_args(words):
        print(f"spr-cluster {version('spr-cluster')}")
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


def _exit_at_once(code: int) -> None:
    """Exit without joining threads that still wait for machines."""
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
