"""Golden files: expected output, so that changes show up in review."""

from __future__ import annotations

import difflib
import os
from pathlib import Path


def check_golden(path: Path, text: str) -> None:
    """Compare with a golden file; ``UPDATE_GOLDEN=1`` rewrites it."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} changed; if it should, run with UPDATE_GOLDEN=1"


def compare(base: str, text: str) -> str:
    """Return how a text differs from its base, with a line around, and without line numbers."""
    lines = difflib.unified_diff(base.splitlines(), text.splitlines(), n=1, lineterm="")
    changed = [*lines][2:]
    return "".join("@@\n" if line.startswith("@@") else f"{line}\n" for line in changed)
