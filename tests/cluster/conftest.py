from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.command_line import CommandLine, open_command_line
from tests.harness.prepared_cluster import Made
from tests.harness.simulated_cloud import ParkCloud, let_no_time_pass, open_park_cloud
from tests.infra.local.fakes import Endpoint, leave_moto_as_it_was

START = 1_800_000_000.0


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Made], Path]:
    """Clusters that were made once, by their wish, and where copies of them are."""
    return {}, tmp_path_factory.mktemp("made")


@pytest.fixture
def park_cloud(
    endpoint: Endpoint,
    made_once: tuple[dict[str, Made], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ParkCloud]:
    """EC2 and its machines in this process, and the tool's context on them."""
    leave_moto_as_it_was(monkeypatch)
    with open_park_cloud(endpoint, tmp_path, START) as park_cloud:
        let_no_time_pass(park_cloud.clock, monkeypatch)
        park_cloud.kept, park_cloud.kept_in = made_once
        yield park_cloud


@pytest.fixture
def line(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    """`spr-cluster` itself, before a cloud called AWS."""
    with open_command_line(endpoint, tmp_path, monkeypatch) as line:
        yield line
