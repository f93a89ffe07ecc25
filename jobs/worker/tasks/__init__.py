"""The tasks that `spr-cluster train` knows; docs/add-a-job.md adds one."""

from __future__ import annotations

from typing import Any

from ..training.task import Task
from .classify import Classify
from .digits import Digits
from .embed.task import Embed
from .lm.task import Lm
from .squad.task import Squad
from .tag import Tag

TASKS: dict[str, type[Task[Any]]] = {
    task.name: task for task in (Squad, Classify, Tag, Embed, Lm, Digits)
}
