from __future__ import annotations

from pathlib import Path

import pytest

from tests.provision.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.make(tmp_path / "machine")
