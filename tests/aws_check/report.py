"""What the check has found: a short table, and a file without ids, addresses, or account numbers."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["same", "differs", "note", "skipped"]
_MASKS = (
    (re.compile(r"Encoded authorization failure message:.*", re.DOTALL), "<encoded>"),
    (re.compile(r"arn:[\w-]+:[^\s\"']+"), "<arn>"),
    (re.compile(r"\b(AKIA|ASIA|AIDA|AROA|ANPA)[A-Z0-9]{8,}\b"), "<key>"),
    (re.compile(r"\b[a-z]{1,10}-[0-9a-f]{8}([0-9a-f]{9})?\b"), "<id>"),
    (re.compile(r"\b\d{12}\b"), "<account>"),
    (re.compile(r"\b\d{1,3}(\.\d{1,3}){3}(/\d+)?\b"), "<address>"),
    (re.compile(r"\b[0-9a-f]{1,4}(:[0-9a-f]{0,4}){3,7}(/\d+)?\b"), "<address>"),
)


def mask(text: str) -> str:
    """Replace what identifies an account, its resources, or this machine."""
    for pattern, word in _MASKS:
        text = pattern.sub(word, text)
    return text


@dataclass(frozen=True)
class Row:
    """The verdict of one check."""

    name: str
    why: str
    verdict: Verdict
    embedded: str = ""
    aws: str = ""
    details: tuple[str, ...] = ()

    def render(self) -> str:
        sides = f"  embedded: {self.embedded}; AWS: {self.aws}" if self.embedded or self.aws else ""
        lines = "".join(f"\n          {line}" for line in self.details)
        return mask(f"{self.verdict:8}  {self.name}{sides}{lines}")


@dataclass
class Report:
    """The rows so far."""

    region: str
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    complete: bool = False

    @property
    def differs(self) -> bool:
        return any(row.verdict == "differs" for row in self.rows)

    def render(self, *, all_rows: bool = False) -> str:
        """Return the rows that a reader has to see, the important ones first."""
        order = ("differs", "skipped", "note", *(("same",) if all_rows else ()))
        shown = [row.render() for verdict in order for row in self.rows if row.verdict == verdict]
        counts = Counter(row.verdict for row in self.rows)
        total = ", ".join(
            f"{counts[v]} {v}" for v in ("same", "differs", "note", "skipped") if counts[v]
        )
        return "\n".join([*shown, f"{len(self.rows)} checks: {total or 'none'}"])

    def write(self, path: Path) -> None:
        content: dict[str, Any] = {
            "version": 1,
            "region": self.region,
            "complete": self.complete,
            **self.versions,
            "checks": [asdict(row) for row in self.rows],
        }
        path.write_text(json.dumps(_masked(content), indent=1) + "\n")


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _masked(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(inner) for inner in value]
    return mask(value) if isinstance(value, str) else value
