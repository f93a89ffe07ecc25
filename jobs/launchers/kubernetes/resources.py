"""Jobs and pods, parsed from the API's objects. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, NamedTuple

from jobs.launchers.kubernetes.manifests import STACK, Manifest
from jobs.launchers.kubernetes.request import TRAIN_JOB, JobKind
from jobs.launchers.launcher import DELETING, QUEUED, RUNNING, SUSPENDED
from jobs.worker.supervisor.attempt import FAILED, SUCCEEDED

_CONTAINERS = ("node", "pytorch")
_DONE = {"Complete": SUCCEEDED, "Succeeded": SUCCEEDED, "Failed": FAILED, "Suspended": SUSPENDED}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(?:(m)|([kKMGTPE])(i?))?")


def core_path(namespace: str, plural: str, name: str = "") -> str:
    """Return the path of objects that every cluster has, such as ``pods``."""
    return f"/api/v1/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")


class Condition(NamedTuple):
    """A condition of a job that is true."""

    type: str
    reason: str
    message: str


@dataclass(frozen=True)
class JobView:
    """A job with its pods. ``node_ranks`` is the number of ranks per pod.

    ``spec`` is its pod specification and ``container`` the training container's; both may be incomplete.
    """

    kind: JobKind
    name: str
    uid: str
    stack: str
    nodes: int
    node_ranks: int
    created: datetime | None
    conditions: tuple[Condition, ...]
    container: Manifest
    spec: Manifest
    is_leaving: bool
    pods: tuple[PodView, ...]

    @property
    def image(self) -> str:
        return str(self.container.get("image") or "")

    @property
    def claim(self) -> str:
        """The claim with its files; "" for a job that this tool did not create."""
        return next(iter(claims_of(self.spec)), "")

    @property
    def state(self) -> str:
        """Queued, running, succeeded, failed, suspended, or deleting."""
        if self.is_leaving:
            return DELETING
        ended = [_DONE[each.type] for each in self.conditions if each.type in _DONE]
        if ended:
            return ended[-1]
        return RUNNING if any(pod.phase == "Running" for pod in self.pods) else QUEUED

    @property
    def is_over(self) -> bool:
        return self.state in (SUCCEEDED, FAILED)

    def pod(self, rank: int) -> PodView | None:
        """Return a rank's newest pod."""
        index = rank // self.node_ranks
        return next((pod for pod in self.pods if pod.index == index), None)


@dataclass(frozen=True)
class PodView:
    """A pod of a job. ``index`` is its node rank; the log of pod 0 is the job's log."""

    name: str
    uid: str
    index: int
    phase: str
    node: str
    created: str
    raw: Manifest

    @property
    def container(self) -> str:
        """The training container; a service mesh, for example, adds others."""
        names = [str(each.get("name")) for each in dig_list(self.raw, "spec", "containers")]
        return next((name for name in names if name in _CONTAINERS), names[0] if names else "")

    @property
    def statuses(self) -> list[Manifest]:
        """The states of its containers."""
        return dig_list(self.raw, "status", "containerStatuses")

    @property
    def restarts(self) -> int:
        return sum(as_int(each.get("restartCount")) for each in self.statuses)

    @property
    def is_over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


def claims_of(spec: Manifest) -> list[str]:
    """Return the claims that a pod mounts, from its specification."""
    found = [dig(each, "persistentVolumeClaim") for each in dig_list(spec, "volumes")]
    return [str(each["claimName"]) for each in found if "claimName" in each]


def parse_job(kind: JobKind, found: Manifest, pods: Sequence[Manifest]) -> JobView:
    """Return a job of either kind, with its pods."""
    meta, spec = dig(found, "metadata"), dig(found, "spec")
    if kind == TRAIN_JOB:
        container, pod = dig(spec, "trainer"), _patched_spec(spec)
        count, ranks = container.get("numNodes"), container.get("numProcPerNode")
    else:
        replicas = dig(spec, "pytorchReplicaSpecs")
        pod = dig(replicas, "Master", "template", "spec")
        container = next(iter(dig_list(pod, "containers")), {})
        count = sum(as_int(dig(replicas, name).get("replicas")) for name in replicas)
        ranks = spec.get("nprocPerNode")
    return JobView(
        kind=kind,
        name=str(meta.get("name")),
        uid=str(meta.get("uid")),
        stack=str(dig(meta, "annotations").get(STACK) or ""),
        nodes=as_int(count, 1),
        node_ranks=as_int(ranks, 1),
        created=parse_time(meta.get("creationTimestamp")),
        conditions=tuple(
            Condition(each.get("type", ""), each.get("reason") or "", each.get("message") or "")
            for each in dig_list(found, "status", "conditions")
            if each.get("status") == "True"
        ),
        container=container,
        spec=pod,
        is_leaving="deletionTimestamp" in meta,
        pods=parse_pods(pods),
    )


def _patched_spec(spec: Manifest) -> Manifest:
    """Return the pods' specification in a TrainJob's patches of its runtime."""
    for patch in dig_list(spec, "runtimePatches"):
        for job in dig_list(patch, "trainingRuntimeSpec", "template", "spec", "replicatedJobs"):
            return dig(job, "template", "spec", "template", "spec")
    return {}


def parse_pods(items: Sequence[Manifest]) -> tuple[PodView, ...]:
    """Return the training pods by node rank, the newest of each first."""
    # Others prepare models or data.
    replica = "jobset.sigs.k8s.io/replicatedjob-name"
    training = [each for each in items if _labels(each).get(replica, "node") == "node"]
    newest = sorted(map(parse_pod, training), key=lambda pod: pod.created, reverse=True)
    return tuple(sorted(newest, key=lambda pod: pod.index))


def parse_pod(found: Manifest) -> PodView:
    meta, labels = dig(found, "metadata"), _labels(found)
    index = as_int(labels.get("batch.kubernetes.io/job-completion-index"))
    if "training.kubeflow.org/replica-index" in labels:
        index = as_int(labels["training.kubeflow.org/replica-index"])
        # The master is the first node, so the first worker is the second.
        index += labels.get("training.kubeflow.org/replica-type") == "worker"
    return PodView(
        name=str(meta.get("name")),
        uid=str(meta.get("uid")),
        index=index,
        phase=str(dig(found, "status").get("phase") or "Pending"),
        node=str(dig(found, "spec").get("nodeName") or ""),
        created=str(meta.get("creationTimestamp")),
        raw=found,
    )


def _labels(found: Manifest) -> Manifest:
    return dig(found, "metadata", "labels")


def dig(found: Mapping[str, Any], *keys: str) -> Manifest:
    """Return a nested object; {} if there is none."""
    for key in keys:
        inner = found.get(key)
        found = inner if isinstance(inner, dict) else {}
    return dict(found)


def dig_list(found: Mapping[str, Any], *keys: str) -> list[Manifest]:
    """Return the objects of a nested list."""
    *path, last = keys
    inner = dig(found, *path).get(last)
    return [each for each in inner if isinstance(each, dict)] if isinstance(inner, list) else []


def as_int(value: object, default: int = 0) -> int:
    """Return a number or its text as a whole number."""
    try:
        return int(value)  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError):
        return default


def parse_time(text: object) -> datetime | None:
    """Return a time in Kubernetes' form, such as ``2026-11-22T14:25:01Z``."""
    try:
        return datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None


def parse_quantity(text: object) -> Decimal | None:
    """Parse a quantity such as ``62``, ``500m``, or ``460Gi``; ``None`` for anything else.

    The client's own parser would import the whole client, which ``render k8s`` does not need.
    """
    found = _QUANTITY.fullmatch(str(text))
    if not found:
        return None
    number, milli, unit, binary = found.groups()
    power = -1 if milli else " KMGTPE".index((unit or " ").upper())
    return Decimal(number) * Decimal(1024 if binary else 1000) ** power
