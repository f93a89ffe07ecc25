"""Golden files: expected output, so that changes show up in review."""

from __future__ import annotations

import os
from pathlib import Path


def check_golden(path: Path, text: str) -> None:
    """Compare with a golden file; ``UPDATE_GOLDEN=1`` rewrites it."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} changed; if it should, run with UPDATE_GOLDEN=1"
