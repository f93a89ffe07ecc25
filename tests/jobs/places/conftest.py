"""This machine as the head of a cluster with a queue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.places.this_machine import ThisMachine


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThisMachine]:
    machine = ThisMachine(tmp_path)
    machine.install()
    monkeypatch.setattr("jobs.places.queue.slurm.VENV", str(tmp_path))
    yield machine
    machine.end()
