"""What the commands that run short trials of a training job have in common."""

from __future__ import annotations

import argparse
import re
from typing import Any

from infra.errors import UsageError
from jobs.launch.plan import FABRICS
from jobs.worker.squad.options import add_arguments

_SECONDS, _MOST_SECONDS = 20, 3600
# A trial ends before these would count.
_MEANINGLESS = {
    "output",
    "eval",
    "epochs",
    "max_steps",
    "trial_seconds",
    "checkpoint_every",
    "keep_checkpoints",
    "resume",
    "learning_rate",
    "warmup_ratio",
}


def add_trial_arguments(add: Any) -> None:
    """What decides about each trial; ``add`` is a group's ``add_argument``."""
    add(
        "--seconds",
        type=int,
        default=_SECONDS,
        help=f"of measured training in each trial (default: {_SECONDS})",
    )
    add("--fabric", choices=FABRICS, default="tcp", help="as for train (default: tcp)")
    add("--demo", action="store_true", help="the job of `train squad --demo`")


def add_training_arguments(
    parser: argparse.ArgumentParser, without: frozenset[str] = frozenset()
) -> None:
    """The training options that mean something in a trial."""
    add_arguments(parser.add_argument_group("training"), without=_MEANINGLESS | without)


def check_seconds(seconds: int) -> None:
    """Raises :class:`infra.errors.UsageError` for a length that no trial can have."""

    if not 1 <= seconds <= _MOST_SECONDS:
        raise UsageError(f"--seconds {seconds} is out of range: 1 to {_MOST_SECONDS}")


def numbers(text: str) -> tuple[int, ...]:
    """``1,2,4`` as numbers, each once; for argparse."""
    if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers such as 1,2,4")
    return tuple(dict.fromkeys(map(int, text.split(","))))
