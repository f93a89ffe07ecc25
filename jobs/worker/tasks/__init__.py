"""The tasks that `spr-cluster train` knows; CONTRIBUTING.md adds one."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..runtime.errors import ModelError
from ..training.options import flag
from ..training.task import Task
from ..training.text_task import TextTask
from .adapters import ADAPTERS, read_adapters
from .classify import Classify
from .digits import Digits
from .embed.task import Embed
from .lm.task import Lm
from .score import Score
from .squad.task import Squad
from .tag import Tag

TASKS: dict[str, type[Task[Any]]] = {
    task.name: task for task in (Squad, Classify, Tag, Score, Embed, Lm, Digits)
}
SCORES = {name: title for task in TASKS.values() for name, title in task.scores.items()}
"""Display names of scores."""
PLAIN_SCORES = {name: shown for task in TASKS.values() for name, shown in task.plain_scores.items()}


def format_score(name: str, value: float, digits: int = 1) -> str:
    """Return a score for display."""
    return format(value, PLAIN_SCORES.get(name) or f".{digits}f")


def find_task(model: str, settings: Collection[str] = ()) -> type[TextTask[Any]]:
    """Return the task of the trained model in a folder.

    Raises :class:`ModelError`, also for ``settings`` that have no effect on its models.
    """
    task = _find_task(model)
    if unknown := [flag(name) for name in settings if name not in task.settings]:
        raise ModelError(f"{', '.join(unknown)}: has no effect on models of `train {task.name}`")
    return task


def _find_task(model: str) -> type[TextTask[Any]]:
    if Path(model, ADAPTERS).exists():
        read_adapters(model)
        return Lm
    try:
        config = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
        names = [str(each) for each in config.get("architectures") or ()]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(f"model {model} can't be loaded: its config.json: {error}") from None
    for task in TASKS.values():
        if issubclass(task, TextTask) and task.has_trained(Path(model), names):
            return task
    raise ModelError(
        f"model {model} is of no task: its architecture is {', '.join(names) or 'unknown'}",
        hint="give the folder `model` in the results of `train`",
    )
