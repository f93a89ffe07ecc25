"""``python -m squad``: one rank of a training run.

Exit code 1 is a failure, 2 bad arguments, 143 the end by a SIGTERM during training, with a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.entry import leave, run_rank
from .job import run
from .options import parse_argv


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job as this rank; every failure ends as an ``error`` event and exit code 1."""
    options = parse_argv(argv)
    return run_rank(lambda events: run(options, events))


if __name__ == "__main__":
    leave(main())
