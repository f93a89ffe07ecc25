from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from moto.ec2.models.elastic_network_interfaces import NetworkInterface
from moto.ec2.models.instances import Instance

from tests.infra.local.fakes import Endpoint, FakeCloud, FakeEngine, state_folder


@pytest.fixture(autouse=True)
def _moto_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded cloud changes moto for its whole process; other tests need it unchanged."""
    unchanged = NetworkInterface.check_auto_public_ip
    monkeypatch.setattr(NetworkInterface, "check_auto_public_ip", unchanged)
    monkeypatch.setattr(Instance, "public_dns_name", Instance.public_dns_name)
    monkeypatch.setattr("infra.local.ec2.used_ranges", list)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="session")
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture
def fake_cloud(endpoint: Endpoint, tmp_path: Path, engine: FakeEngine) -> Iterator[FakeCloud]:
    with endpoint.serve(state_folder(tmp_path), engine) as cloud:
        yield cloud
