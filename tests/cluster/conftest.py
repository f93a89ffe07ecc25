from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.command_line import CommandLine, open_command_line
from tests.harness.simulated_cloud import (
    SimulatedCloud,
    install_jump_tools,
    let_no_time_pass,
    open_simulated_cloud,
)
from tests.infra.local.fakes import Endpoint, leave_moto_as_it_was

START = 1_800_000_000.0


@pytest.fixture
def cloud(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SimulatedCloud]:
    """EC2 and its machines in this process, and the tool's context on them."""
    leave_moto_as_it_was(monkeypatch)
    with open_simulated_cloud(endpoint, tmp_path, START) as cloud:
        let_no_time_pass(cloud.clock, monkeypatch)
        install_jump_tools(monkeypatch)
        yield cloud


@pytest.fixture
def line(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    """`spr-cluster` itself, before a cloud called AWS."""
    with open_command_line(endpoint, tmp_path, monkeypatch) as line:
        yield line
