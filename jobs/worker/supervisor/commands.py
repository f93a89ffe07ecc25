"""Commands that may fail, hang, or be missing: what they print, and whether they succeed."""

from __future__ import annotations

import subprocess
from typing import Any

_TIMEOUT_S = 30.0


def ask(argv: list[str], timeout_s: float = _TIMEOUT_S, **options: Any) -> str | None:
    """Return what a command prints; ``None`` if it fails. ``options`` are those of ``subprocess.run``."""
    options.update(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    done = _run(argv, timeout_s, options)
    return done.stdout.decode(errors="replace") if done and done.returncode == 0 else None


def succeeds(argv: list[str], timeout_s: float = _TIMEOUT_S, **options: Any) -> bool:
    """Return whether a command succeeds."""
    done = _run(argv, timeout_s, options)
    return done is not None and done.returncode == 0


def _run(
    argv: list[str], timeout_s: float, options: dict[str, Any]
) -> subprocess.CompletedProcess[bytes] | None:
    try:
        return subprocess.run(argv, timeout=timeout_s, check=False, **options)
    except (OSError, subprocess.TimeoutExpired):
        return None
