from __future__ import annotations

from pathlib import Path

import pytest

from infra.ec2.key_pair import generate_key_pair
from infra.files import write_private
from provision.host import Login
from tests.provision.machine import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.make(tmp_path / "machine")


@pytest.fixture
def login(tmp_path: Path) -> Login:
    key = tmp_path / "id"
    write_private(key, generate_key_pair("test").private)
    return Login(key, tmp_path / "known_hosts")
