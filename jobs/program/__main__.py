"""``python -m jobs.program --folder F --output O [--env K=V]… -- PROGRAM ARGS``: one rank of a job.

It checks that the rank runs where it was planned to, and then becomes the program. Exit codes are the
program's; 1 where the placement is not the planned one, 127 where there is no such program.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..squad.distributed import read_identity
from ..squad.errors import PlacementError, SquadError
from ..squad.events import Events
from ..squad.pinning import take_place
from .environment import program_environment

_NO_PROGRAM = 127


def main(argv: Sequence[str] | None = None) -> int:
    """Become the program; returns only where that fails."""
    args = _parse(argv)
    events = Events()
    try:
        events = Events(read_identity(os.environ).rank)
        # Not by loading torch: it may bind this thread to a CPU, which the program would inherit.
        take_place(os.environ, _threads_asked_for)
        environ = program_environment(os.environ, args.output, args.env)
    except SquadError as error:
        events.error(error.message, error.hint)
        return 1
    try:
        os.chdir(args.folder)
        os.execvpe(args.program[0], args.program, environ)
    except OSError as error:
        events.error(
            f"{args.program[0]} can't be run: {error.strerror}",
            "is it installed on the nodes, or among the job's files, and executable?",
        )
    return _NO_PROGRAM


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="program", description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", required=True, help="where the program begins")
    parser.add_argument("--output", required=True, help="what SPR_OUTPUT says")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("program", nargs="+", help="after --: the program and its arguments")
    return parser.parse_args(argv)


def _threads_asked_for() -> int:
    """What OpenMP is told; nobody has counted its threads yet."""
    try:
        return int(os.environ["OMP_NUM_THREADS"])
    except (KeyError, ValueError) as error:
        raise PlacementError(f"OMP_NUM_THREADS is not set to a number: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
