"""Golden files: expected output, so that changes show up in review."""

from __future__ import annotations

import difflib
import os
import re
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


def read_sections(path: Path) -> dict[str, str]:
    """Return the parts of a golden file, each of which begins with its name in ``== name``."""
    parts = re.split(r"^== (.*)\n", path.read_text(), flags=re.MULTILINE)
    return {name: text.rstrip("\n") for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def check_section(path: Path, name: str, text: str) -> None:
    """Compare with one part of a golden file; ``UPDATE_GOLDEN=1`` rewrites it."""
    sections = read_sections(path) if path.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        sections[name] = text
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(f"== {name}\n{text}\n" for name, text in sections.items()))
    assert text == sections[name], (
        f"{path.name}: {name} changed; if it should, run with UPDATE_GOLDEN=1"
    )
