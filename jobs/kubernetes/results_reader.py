"""Fetching of a job's files from its claim, through a pod that exists only for that."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from infra.errors import DeadlineError, JobError, UsageError
from infra.wait import wait_until
from infra.words import format_size
from jobs.kubernetes.errors import KubernetesError
from jobs.kubernetes.jobs import find_warnings
from jobs.kubernetes.manifests import LABEL, MANAGER, Manifest
from jobs.kubernetes.preflight import MANY, find_missing_rights
from jobs.kubernetes.problems import explain_pod, refuse
from jobs.kubernetes.request import CLAIM_PATH
from jobs.kubernetes.resources import PodView, claims_of, core_path, dig, parse_pod
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
# A command over a web socket is a GET; from Kubernetes 1.35 on, it also needs the right to create.
_RIGHTS = ("create pods", "get pods", "delete pods", "create pods/exec", "get pods/exec")
# Checkpoints stay on the claim, as they stay on the nodes of a cluster of machines. Code 1 means that a
# file changed while it was read: the job is still running.
_TAR = (
    *("sh", "-c", 'tar "$@" || test $? -eq 1', "tar"),
    "--exclude=output/checkpoints",
    "--exclude=output/model/checkpoint-*",
)
Note = Callable[[str], None]


@dataclass(frozen=True)
class ResultsSource:
    """Where a job's files are: a claim, and an image that has ``tar``."""

    job: str
    claim: str
    image: str
    spec: Manifest = field(default_factory=dict)
    """Of the job's pods, for the user and the pull secret."""


def find_holder(api: KubernetesApi, source: ResultsSource) -> PodView | None:
    """Return the pod that has, or else last had, a claim that serves one node at a time; else ``None``.

    Raises :class:`UsageError` if the files can't be read, before anything is created.
    """
    refuse(find_missing_rights(api, _RIGHTS))
    claim = api.peek(core_path(api.namespace, "persistentvolumeclaims", source.claim))
    if claim == {}:
        raise UsageError(f"claim {source.claim} doesn't exist", hint="--claim NAME names another")
    modes = dig(claim or {}, "spec").get("accessModes") or (MANY,)
    pods = api.items(core_path(api.namespace, "pods"))
    held = [parse_pod(pod) for pod in pods if source.claim in claims_of(dig(pod, "spec"))]
    found = [pod for pod in held if pod.node]
    if MANY in modes or not found:
        return None
    holder = max(found, key=lambda pod: (not pod.is_over, pod.created))
    if "ReadWriteOncePod" in modes and not holder.is_over:
        raise UsageError(
            f"claim {source.claim} serves one pod at a time, and pod {holder.name} has it",
            hint="fetch once the job has ended",
        )
    return holder


def fetch_results(
    api: KubernetesApi, source: ResultsSource, holder: PodView | None, target: Path, note: Note
) -> None:
    """Download the job's output into a folder. Raises :class:`KubernetesError` if that fails."""
    with (
        _reader(api, source, holder, note) as pod,
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


def _download(
    api: KubernetesApi, pod: str, source: ResultsSource, bundle: Path, note: Note
) -> None:
    command = [*_TAR, "-C", f"{CLAIM_PATH}/jobs/{source.job}", "-cf", "-", "output"]
    size = shown = 0
    with bundle.open("wb") as file:
        for chunk in api.run(pod, _CONTAINER, command):
            size += file.write(chunk)
            if size - shown >= _NOTED:
                shown = size
                note(format_size(size))


@contextmanager
def _reader(
    api: KubernetesApi, source: ResultsSource, holder: PodView | None, note: Note
) -> Iterator[str]:
    """Run a pod that has the claim, and yield its path; delete it in every case."""
    name = f"{source.job}-reader-{secrets.token_hex(2)}"
    path = core_path(api.namespace, "pods", name)
    try:
        api.create(core_path(api.namespace, "pods"), render_reader(source, name, holder))
        _wait_until_running(api, path, holder, note)
        yield path
    finally:
        api.delete(path, {"gracePeriodSeconds": "0"})


def _wait_until_running(api: KubernetesApi, path: str, holder: PodView | None, note: Note) -> None:
    name, reason = path.rpartition("/")[2], ""

    def is_running() -> bool | None:
        nonlocal reason
        pod = parse_pod(api.get(path))
        problem = explain_pod(pod)
        reason = problem.text if problem else ""
        # Until it has a node, it may get one.
        if pod.is_over or (problem and pod.node):
            hint = problem.fix if problem else None
            raise KubernetesError(reason or f"pod {name} ended too early", hint=hint)
        if pod.phase == "Running":
            return True
        note(reason or f"waiting for pod {name}")
        return None

    try:
        what = f"the start of pod {name}"
        wait_until(what, is_running, deadline_s=_START_DEADLINE_S, clock=api.clock)
    except DeadlineError as error:
        # The scheduler says why in the pod; kubelet, which mounts the volume, only in an event.
        events = [str(each.get("message")) for each in find_warnings(api, name)]
        reason = reason or " ".join("".join(events[-1:]).split()) or "the cluster does not say why"
        hint = "try again once the cluster has room for a small pod"
        if holder and not holder.is_over:
            hint = (
                f"its claim serves one node at a time, now {holder.node}, where pod {holder.name} runs: "
                "fetch once the job has ended"
            )
        raise DeadlineError(f"{error.message}: {reason}", hint=hint) from error


def render_reader(source: ResultsSource, name: str, holder: PodView | None) -> Manifest:
    """Return the pod: the job's image and user, and little else. Pure."""
    resources = {"cpu": "500m", "memory": "256Mi"}
    container = {
        "name": _CONTAINER,
        "image": source.image,
        "command": ["sleep", str(_LIFE_S)],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": "workspace", "mountPath": CLAIM_PATH}],
    }
    volume = {"name": "workspace", "persistentVolumeClaim": {"claimName": source.claim}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {LABEL: MANAGER}},
        "spec": {
            **{key: source.spec[key] for key in _KEPT if key in source.spec},
            **({"affinity": {"nodeAffinity": _beside(holder)}} if holder else {}),
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _LIFE_S,
            "containers": [container],
            "volumes": [volume],
        },
    }


def _beside(holder: PodView) -> Manifest:
    """Return the affinity to a pod's node. Once that pod is over, another node may have to do."""
    field = {"key": "metadata.name", "operator": "In", "values": [holder.node]}
    term = {"matchFields": [field]}
    if holder.is_over:
        weighed = {"weight": 100, "preference": term}
        return {"preferredDuringSchedulingIgnoredDuringExecution": [weighed]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
