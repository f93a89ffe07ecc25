from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.aws import Recorder, answered_directly
from tests.infra.hasty_time import AtOnce, HastyTime
from tests.infra.local.fakes import (
    Endpoint,
    FakeCloud,
    FakePodman,
    leave_moto_as_it_was,
    state_folder,
)


@pytest.fixture
def ec2_cloud(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCloud]:
    """The embedded cloud in this process, on a clock that only ``sleep`` advances."""
    leave_moto_as_it_was(monkeypatch)
    folder = state_folder(tmp_path)
    with (
        endpoint.serve(folder, FakePodman(), clock=HastyTime(), saving=False) as cloud,
        answered_directly(cloud.endpoint.url, cloud.application),
    ):
        cloud.application.runtime.containers._background = AtOnce()  # type: ignore[assignment]
        yield cloud


@pytest.fixture
def http_cloud(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCloud]:
    """The embedded cloud as the tool reaches it: with HTTP, signatures, and this machine's time."""
    leave_moto_as_it_was(monkeypatch)
    with endpoint.serve(state_folder(tmp_path), FakePodman(), saving=False) as cloud:
        yield cloud


@pytest.fixture
def ec2_calls(ec2_cloud: FakeCloud) -> Iterator[Recorder]:
    """Every EC2 request from here on."""
    recorder = Recorder()
    with recorder.watching(ec2_cloud.clients):
        yield recorder
