"""Fetching of a job's files from its claim, through a pod that exists only for that."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.errors import JobError
from infra.wait import wait_until
from infra.words import format_size
from jobs.kubernetes.errors import KubernetesError
from jobs.kubernetes.manifests import LABEL, MANAGER, Manifest
from jobs.kubernetes.request import CLAIM_PATH
from jobs.kubernetes.resources import core_path, parse_pods
from jobs.kubernetes.troubles import explain_pod
from jobs.launch.files import unpack_results

if TYPE_CHECKING:
    from jobs.kubernetes.api import KubernetesApi

_START_DEADLINE_S = 300.0
# If this process is killed, the pod ends by itself.
_LIFE_S = 3600
_TRIES = 3
_CONTAINER = "reader"
_NOTED = 16 << 20
_KEPT = ("securityContext", "imagePullSecrets", "tolerations")
# Checkpoints stay on the claim, as they stay on the nodes of a cluster of machines. Code 1 means that a
# file changed while it was read: the job is still running.
_TAR = (
    *("sh", "-c", 'tar "$@" || test $? -eq 1', "tar"),
    "--exclude=output/checkpoints",
    "--exclude=output/model/checkpoint-*",
)
Note = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """Where a job's files are: a claim, and an image that has ``tar``."""

    job: str
    claim: str
    image: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Of the job's pods, for the user and the pull secret."""


def fetch_results(api: KubernetesApi, source: Source, target: Path, note: Note) -> None:
    """Download the job's output into a folder. Raises :class:`KubernetesError` if that fails."""
    target.mkdir(parents=True, exist_ok=True)
    with (
        _reader(api, source, note) as pod,
        # Not in /tmp, which may be in memory: a model can be larger than that.
        tempfile.TemporaryDirectory(dir=target, prefix=".fetch-") as folder,
    ):
        bundle = Path(folder, "output.tar")
        for rest in reversed(range(_TRIES)):
            try:
                _download(api, pod, source, bundle, note)
                unpack_results(bundle, target, source.job)
                return
            except (KubernetesError, JobError) as error:
                if not rest or (isinstance(error, KubernetesError) and error.status):
                    raise
                note(f"trying again: {error.message}")


def _download(api: KubernetesApi, pod: str, source: Source, bundle: Path, note: Note) -> None:
    command = [*_TAR, "-C", f"{CLAIM_PATH}/jobs/{source.job}", "-cf", "-", "output"]
    size = shown = 0
    with bundle.open("wb") as file:
        for chunk in api.run(pod, _CONTAINER, command):
            file.write(chunk)
            size += len(chunk)
            if size - shown >= _NOTED:
                shown = size
                note(format_size(size))


@contextmanager
def _reader(api: KubernetesApi, source: Source, note: Note) -> Iterator[str]:
    """Run a pod that has the claim, and yield its path; delete it in every case."""
    manifest = render_reader(source, f"{source.job}-reader-{secrets.token_hex(2)}")
    pods = core_path(api.namespace, "pods")
    path = f"{pods}/{manifest['metadata']['name']}"
    try:
        api.create(pods, manifest)
        wait_until(
            f"the start of pod {manifest['metadata']['name']}",
            lambda: _is_running(api, path, note),
            deadline_s=_START_DEADLINE_S,
            clock=api.clock,
        )
        yield path
    finally:
        api.delete(path, {"gracePeriodSeconds": "0"})


def _is_running(api: KubernetesApi, path: str, note: Note) -> bool | None:
    pod = parse_pods([api.get(path)])[0]
    trouble = explain_pod(pod)
    if pod.is_over or (trouble and "can't" in trouble.text):
        message = trouble.text if trouble else f"pod {pod.name} ended too early"
        raise KubernetesError(message, hint=trouble.fix if trouble else None)
    if pod.phase != "Running":
        note(trouble.text if trouble else f"waiting for pod {pod.name}")
        return None
    return True


def render_reader(source: Source, name: str) -> Manifest:
    """Return the pod: the job's image and user, and little else. Pure."""
    resources = {"cpu": "500m", "memory": "256Mi"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {LABEL: MANAGER}},
        "spec": {
            **{key: source.spec[key] for key in _KEPT if key in source.spec},
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _LIFE_S,
            "containers": [
                {
                    "name": _CONTAINER,
                    "image": source.image,
                    "command": ["sleep", str(_LIFE_S)],
                    "resources": {"requests": resources, "limits": resources},
                    "volumeMounts": [{"name": "workspace", "mountPath": CLAIM_PATH}],
                }
            ],
            "volumes": [
                {"name": "workspace", "persistentVolumeClaim": {"claimName": source.claim}}
            ],
        },
    }
