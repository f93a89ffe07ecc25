"""This machine as the head of a cluster with a queue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.launch.this_machine import ThisMachine


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThisMachine]:
    machine = ThisMachine(tmp_path / "node0")
    machine.home.mkdir()
    machine.install()
    monkeypatch.setattr("jobs.launch.mpirun.VENV", str(machine.bin.parent))
    yield machine
    machine.end()
