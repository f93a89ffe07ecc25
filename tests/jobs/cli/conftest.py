"""The command line in this process, as the tests of cluster commands have it; and a Kubernetes cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra import wait
from tests.cluster.conftest import line, prepared_clusters, simulated_cloud
from tests.harness.command_line import CommandLine, open_command_line
from tests.infra.local.fakes import Endpoint
from tests.jobs.launchers.kubernetes.scenes import node, write_kubeconfig
from tests.jobs.launchers.kubernetes.server import TRAINER, KubernetesServer

__all__ = ["line", "prepared_clusters", "simulated_cloud"]


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
            line.must("up", "--nodes", str(nodes), "--yes")
            yield line


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesServer]:
    """A cluster that can take a job of two nodes, and the kubeconfig of this process."""
    sleep = time.sleep
    monkeypatch.setattr(wait.SystemClock, "sleep", lambda self, seconds: sleep(min(seconds, 0.01)))
    server = KubernetesServer()
    try:
        write_kubeconfig(server, tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        monkeypatch.chdir(tmp_path)
        server.put(f"{TRAINER}/clustertrainingruntimes/torch-distributed", {})
        default = {"storageclass.kubernetes.io/is-default-class": "true"}
        server.put(
            "/apis/storage.k8s.io/v1/storageclasses/nfs",
            {"metadata": {"annotations": default}, "provisioner": "nfs.csi.k8s.io"},
        )
        for number in range(2):
            node(server, f"worker{number}")
        yield server
    finally:
        server.close()
