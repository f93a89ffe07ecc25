from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.state import StateFolder
from tests.infra.local.fakes import (
    Endpoint,
    FakeCloud,
    FakePodman,
    leave_moto_as_it_was,
    state_folder,
)


@pytest.fixture(autouse=True)
def _moto_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_moto_as_it_was(monkeypatch)


@pytest.fixture
def podman() -> FakePodman:
    return FakePodman()


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return state_folder(tmp_path)


@pytest.fixture
def fake_cloud(endpoint: Endpoint, tmp_path: Path, podman: FakePodman) -> Iterator[FakeCloud]:
    with endpoint.serve(state_folder(tmp_path), podman) as cloud:
        yield cloud
