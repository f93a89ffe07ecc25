"""Options of the commands that run short trials of a training job."""

from __future__ import annotations

import argparse
import re
from typing import Any

from infra.errors import UsageError
from jobs.worker.tasks import TASKS

_SECONDS, _MAX_SECONDS = 20, 3600
# Without effect in a trial.
_WITHOUT_EFFECT = {
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
    """Add the options of each trial; ``add`` is a group's ``add_argument``."""
    add(
        "--seconds",
        type=int,
        default=_SECONDS,
        help=f"seconds of measured training per trial (default: {_SECONDS})",
    )
    add("--demo", action="store_true", help="try the job of `train TASK --demo`")


def add_training_arguments(
    parser: argparse.ArgumentParser, task: str, without: frozenset[str] = frozenset()
) -> None:
    """Add the training options that have an effect in a trial."""
    TASKS[task].Options.add_arguments(
        parser.add_argument_group("training"), without=_WITHOUT_EFFECT | without
    )


def check_seconds(seconds: int) -> None:
    """Raise :class:`infra.errors.UsageError` if no trial can be that long."""
    if not 1 <= seconds <= _MAX_SECONDS:
        raise UsageError(f"--seconds {seconds} is out of range: 1 to {_MAX_SECONDS}")


def numbers(text: str) -> tuple[int, ...]:
    """Parse ``1,2,4`` into distinct numbers; a ``type`` for argparse."""
    if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers such as 1,2,4")
    return tuple(dict.fromkeys(map(int, text.split(","))))
