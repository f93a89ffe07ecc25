from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.state import StateFolder
from tests.aws import answered_directly
from tests.infra.local.fakes import (
    Endpoint,
    FakeCloud,
    FakePodman,
    FakeTime,
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
def fake_cloud(endpoint: Endpoint, folder: StateFolder, podman: FakePodman) -> Iterator[FakeCloud]:
    with endpoint.serve(folder, podman) as cloud, answered_directly(endpoint.url, endpoint.answer):
        yield cloud


@pytest.fixture
def timed_cloud(endpoint: Endpoint, folder: StateFolder, podman: FakePodman) -> Iterator[FakeCloud]:
    """The embedded cloud on a clock that only ``sleep`` advances."""
    with (
        endpoint.serve(folder, podman, clock=FakeTime()) as cloud,
        answered_directly(endpoint.url, endpoint.answer),
    ):
        yield cloud
