"""The command line in this process, as the tests of cluster commands have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.conftest import cloud as simulated_cloud
from tests.cluster.conftest import line
from tests.harness.command_line import CommandLine, open_command_line
from tests.infra.local.fakes import Endpoint

__all__ = ["line", "simulated_cloud"]


@pytest.fixture(scope="module")
def one(endpoint: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A cluster of one node, for all tests of a file."""
    with _standing(endpoint, tmp_path_factory, 1) as line:
        yield line


@pytest.fixture(scope="module")
def two(endpoint: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A cluster of two nodes, for all tests of a file."""
    with _standing(endpoint, tmp_path_factory, 2) as line:
        yield line


@contextmanager
def _standing(
    endpoint: Endpoint, factory: pytest.TempPathFactory, nodes: int
) -> Iterator[CommandLine]:
    with pytest.MonkeyPatch.context() as patch:
        folder = factory.mktemp("standing")
        patch.setenv("SPR_CLUSTER_HOME", str(folder / "home"))
        with open_command_line(endpoint, folder, patch) as line:
            line.begin("--nodes", str(nodes))
            yield line
