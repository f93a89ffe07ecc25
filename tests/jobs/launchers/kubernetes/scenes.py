"""What tests put into the minimal API: nodes, jobs, states of pods; and a kubeconfig for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.harness.command_line import CommandResult
from tests.jobs.launchers.kubernetes.server import OPERATOR, TRAINER, KubernetesServer

K8s = Callable[..., CommandResult]
"""Runs a subcommand of ``spr-cluster k8s``."""
IMAGE = ("--image", "ghcr.io/me/spr:1")
JOB = f"{OPERATOR}/namespaces/ml/pytorchjobs/bert"
TRAIN_JOB = f"{TRAINER}/namespaces/ml/trainjobs/bert"
CLAIM = "/api/v1/namespaces/ml/persistentvolumeclaims/spr-cluster"
AMX = "feature.node.kubernetes.io/cpu-cpuid.AMXBF16"


def write_kubeconfig(server: KubernetesServer, file: Path, **user: Any) -> None:
    """Write the kubeconfig of a context ``lab`` with namespace ``ml``."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {"server": server.url}}],
        "users": [{"name": "ada", "user": user or {"token": "secret"}}],
        "contexts": [
            {"name": "lab", "context": {"cluster": "lab", "user": "ada", "namespace": "ml"}}
        ],
    }
    file.write_text(yaml.safe_dump(content))


def node(server: KubernetesServer, name: str, **more: Any) -> None:
    content = {
        "metadata": {"labels": {AMX: "true"}},
        "status": {"allocatable": {"cpu": "63500m", "memory": "500Gi"}},
    }
    server.put(f"/api/v1/nodes/{name}", {**content, **more})


def job(server: KubernetesServer, *conditions: str, message: str = "") -> None:
    """Keep a PyTorchJob of two nodes, with conditions that hold."""
    pod = {
        "containers": [{"image": "ghcr.io/me/spr:1"}],
        "volumes": [{"persistentVolumeClaim": {"claimName": "spr-cluster"}}],
    }
    replica = {"replicas": 1, "template": {"spec": pod}}
    held = [{"type": each, "status": "True", "message": message} for each in conditions]
    spec = {"nprocPerNode": "1", "pytorchReplicaSpecs": {"Master": replica, "Worker": replica}}
    server.put(JOB, {"spec": spec, "status": {"conditions": held}})


def ended(code: int, reason: str = "Error") -> dict[str, Any]:
    state = {"terminated": {"reason": reason, "exitCode": code}}
    return {"containerStatuses": [{"state": state}]}
