"""Kubeconfigs, credentials, and servers that are no good: one clear line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launchers.kubernetes.scenes import K8s, write_kubeconfig
from tests.jobs.launchers.kubernetes.server import KubernetesServer, status


@pytest.mark.parametrize(
    ("fault", "message", "code"),
    [
        (status(401, "Unauthorized"), "the cluster refuses the credentials of context lab", 1),
        (status(403, 'User "ada" cannot get path'), 'context lab: User "ada" cannot get path', 1),
        (status(500, "etcdserver: no leader"), "context lab: etcdserver: no leader", 1),
    ],
)
def test_a_refusal_is_one_line(
    k8s: K8s, server: KubernetesServer, fault: Any, message: str, code: int
) -> None:
    server.fail = lambda method, path: fault
    result = k8s("jobs")

    assert (result.code, result.out) == (code, "")
    assert result.err.startswith(f"spr-cluster: {message}")


def test_a_short_fault_is_no_failure(k8s: K8s, server: KubernetesServer) -> None:
    faults = [status(503, "apiserver is shutting down")] * 2
    server.fail = lambda method, path: faults.pop() if faults else None

    assert k8s("jobs").code == 0


def test_a_server_that_does_not_answer_is_named(k8s: K8s, server: KubernetesServer) -> None:
    server.close()
    result = k8s("jobs")

    assert result.code == 1
    assert f"spr-cluster: context lab: {server.url} doesn't answer: " in result.err
    assert "refused" in result.err


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, (), "doesn't exist"),
        ("", (), "file is empty"),
        ("hello", (), "kubeconfig: "),
        ("a: [", (), "kubeconfig: "),
        ("contexts: []\nusers: []\nclusters: []\n", (), "Expected key current-context"),
        (None, ("--context", "x"), "doesn't exist"),
        ("ok", ("--context", "x"), "--context x: "),
        ("ok", ("--namespace", "a/../b"), "expected lower-case letters"),
    ],
)
def test_a_kubeconfig_that_is_no_good(
    k8s: K8s,
    server: KubernetesServer,
    tmp_path: Path,
    content: str | None,
    words: tuple[str, ...],
    message: str,
) -> None:
    file = tmp_path / "kubeconfig"
    if content is None:
        file.unlink()
    elif content != "ok":
        file.write_text(content)
    result = k8s("jobs", *words)

    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert len(result.err.splitlines()) <= 3
    assert server.requests == []


def test_a_credentials_plugin_that_fails_is_named(
    k8s: K8s, server: KubernetesServer, tmp_path: Path
) -> None:
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "sh",
        "args": ["-c", "echo 'token expired' >&2; exit 1"],
    }
    write_kubeconfig(server, tmp_path / "kubeconfig", exec=plugin)
    result = k8s("jobs")

    assert result.code == 2
    assert "context lab: its credentials plugin failed: " in result.err
    assert "token expired" in result.err
