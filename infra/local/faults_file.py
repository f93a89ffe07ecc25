"""The faults of this user's embedded cloud: shown, put in force and cleared, running or not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.local.faults import Faults, read_faults
from infra.local.state import StateFolder, write_atomically


@dataclass(frozen=True)
class FaultsShown:
    """What is in force: the file with its text, and its values with every default."""

    file: str | None
    text: str
    values: dict[str, Any]


def show_faults() -> FaultsShown:
    """The faults in force; raises :class:`UsageError` where their file is broken."""
    path = StateFolder.of_user().faults
    if not path.exists():
        return FaultsShown(None, "", _values(Faults()))
    faults, _ = read_faults(path)
    return FaultsShown(str(path), path.read_text(), _values(faults))


def put_faults(source: Path) -> None:
    """Put a copy of this file in force; raises :class:`UsageError` where it is wrong.

    A running server takes it up within half a second, and counts calls and machines anew.
    """
    read_faults(source)
    folder = StateFolder.of_user()
    folder.create()
    write_atomically(folder.faults, source.read_bytes())


def clear_faults() -> None:
    """No faults from now on."""
    StateFolder.of_user().faults.unlink(missing_ok=True)


def _values(faults: Faults) -> dict[str, Any]:
    return faults.model_dump(mode="json") | faults.times.model_dump()
