"""Names of checkpoints: ``checkpoints/step-000123`` is a run's state after step 123.

Anything else in that folder, such as ``step-000123.partial``, is not a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath

CHECKPOINTS = "checkpoints"
LAST = "checkpoint.json"
"""The file of a checkpoint that is stored last: with it, the checkpoint is complete."""
PATTERN = "step-[0-9]{6,}"
"""For Python and for ``grep -E``."""


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after a step."""
    return f"step-{step:06d}"


def step_of(path: str | PurePath) -> int:
    """Return the step of the checkpoint with this path; -1 if it is not a checkpoint."""
    name = PurePath(path).name
    return int(name.partition("-")[2]) if re.fullmatch(PATTERN, name) else -1


def newest(paths: Iterable[str | PurePath]) -> str:
    """Return the name of the newest checkpoint among these paths; "" if there is none."""
    found = max(paths, key=step_of, default="")
    return PurePath(found).name if step_of(found) >= 0 else ""


def newest_complete(files: Iterable[str], folder: str) -> str:
    """Return the name of the newest checkpoint below a folder of which these files include the last one."""
    ends = (name for name in files if name.startswith(f"{folder}/") and name.endswith(f"/{LAST}"))
    return newest(PurePath(name).parent for name in ends)
