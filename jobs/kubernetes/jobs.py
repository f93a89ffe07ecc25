"""The jobs of a namespace: found, followed, and deleted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from infra.errors import UsageError
from infra.wait import wait_until
from infra.words import counted
from jobs.kubernetes.errors import KubernetesError
from jobs.kubernetes.manifests import Manifest
from jobs.kubernetes.pod_log import PodLog
from jobs.kubernetes.problems import KubernetesProblem, find_problems, select_warnings
from jobs.kubernetes.resources import (
    JOB_KINDS,
    JobKind,
    JobView,
    PodView,
    core_path,
    dig,
    dig_list,
    parse_job,
    parse_pods,
)
from jobs.launch.ending import FAILED, SUCCEEDED

if TYPE_CHECKING:
    from jobs.kubernetes.api import KubernetesApi

DONE = (SUCCEEDED, FAILED)
_EVERY_S = 2.0
# Pods have 150 s for a checkpoint.
_GONE_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Found:
    """A job with its pods."""

    job: JobView
    pods: tuple[PodView, ...]

    @property
    def state(self) -> str:
        return self.job.state(self.pods)

    def pod(self, rank: int) -> PodView | None:
        """Return the newest pod in which a rank runs."""
        index = rank // self.job.node_ranks
        return next((pod for pod in self.pods if pod.index == index), None)


def list_found(api: KubernetesApi) -> list[Found]:
    """Return the jobs of the namespace, of all kinds that the cluster serves, oldest first."""
    found = []
    for kind in require_kinds(api):
        pods = api.items(core_path(api.namespace, "pods"), kind.pod_label)
        for each in api.items(kind.path(api.namespace)):
            job = parse_job(kind, each)
            own = [p for p in pods if dig(p, "metadata", "labels")[kind.pod_label] == job.name]
            found.append(Found(job, parse_pods(own)))
    return sorted(found, key=lambda each: str(each.job.created))


def require_kinds(api: KubernetesApi) -> tuple[JobKind, ...]:
    """Return the kinds of jobs that the cluster serves, the preferred one first.

    Raises :class:`UsageError` if there are none.
    """
    if kinds := tuple(kind for kind in JOB_KINDS if _serves(api, kind)):
        return kinds
    raise UsageError(
        f"context {api.context}: the cluster has neither TrainJob nor PyTorchJob",
        hint="install Kubeflow Trainer 2.2 or newer (TrainJob), or training-operator 1.x (PyTorchJob): "
        "https://www.kubeflow.org/docs/components/trainer/operator-guides/installation/",
    )


def _serves(api: KubernetesApi, kind: JobKind) -> bool:
    found = dig_list(api.find(kind.root) or {}, "resources")
    return any(each.get("name") == kind.plural for each in found)


def find_job(api: KubernetesApi, name: str) -> Found | None:
    """Return a job of either kind; ``None`` if there is none with this name."""
    for kind in require_kinds(api):
        if found := api.find(kind.path(api.namespace, name)):
            return Found(parse_job(kind, found), find_pods(api, kind, name))
    return None


def require_job(api: KubernetesApi, name: str) -> Found:
    """Return a job. Raises :class:`UsageError` if there is none with this name."""
    if found := find_job(api, name):
        return found
    raise UsageError(
        f"no job {name} in namespace {api.namespace} of context {api.context}",
        hint="`spr-cluster k8s status` lists the jobs there; --namespace and --context choose others",
    )


def find_pods(api: KubernetesApi, kind: JobKind, name: str) -> tuple[PodView, ...]:
    selector = f"{kind.pod_label}={name}"
    return parse_pods(api.items(core_path(api.namespace, "pods"), selector))


def explain(api: KubernetesApi, found: Found) -> list[KubernetesProblem]:
    """Return why a job waits or has failed."""
    warnings = [] if found.pods else find_warnings(api, found.job.name)
    return find_problems(found.job, found.pods, warnings)


def find_warnings(api: KubernetesApi, name: str) -> list[Manifest]:
    """Return the warnings about a job or a pod, the newest last; none if they may not be read."""
    events = dig_list(api.peek(core_path(api.namespace, "events")) or {}, "items")
    return select_warnings(events, name)


def follow_log(api: KubernetesApi, pod: PodView, on_line: Callable[[str], None]) -> None:
    """Pass on a pod's log until the pod is over or gone."""
    path = core_path(api.namespace, "pods", pod.name)

    def is_over() -> bool:
        now = parse_pods([api.get(path)])
        # Another pod may have got its name.
        return not now or now[0].uid != pod.uid or now[0].is_over

    try:
        PodLog(api, pod, on_line).follow(is_over)
    except KubernetesError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise


def follow_job(
    api: KubernetesApi,
    name: str,
    on_line: Callable[[str], None],
    on_problem: Callable[[KubernetesProblem], None],
    rank: int = 0,
) -> Found:
    """Pass on the log of the pod with a rank, and of those that replace it, until the job ends.

    Each reason for its wait is passed on once.
    """
    done: set[str] = set()
    told: set[KubernetesProblem] = set()
    while True:
        found = require_job(api, name)
        pod = found.pod(rank)
        if pod and pod.uid not in done and (pod.is_over or pod.phase == "Running"):
            done.add(pod.uid)
            follow_log(api, pod, on_line)
            continue
        if found.state in DONE:
            return found
        for problem in [each for each in explain(api, found) if each not in told]:
            told.add(problem)
            on_problem(problem)
        api.clock.sleep(_EVERY_S)


def delete_job(api: KubernetesApi, found: Found, on_wait: Callable[[str], None]) -> None:
    """Delete a job, and wait until its pods are gone. Raises :class:`DeadlineError`."""
    kind, name = found.job.kind, found.job.name
    path = kind.path(api.namespace, name)
    api.delete(path, {"propagationPolicy": "Foreground"})

    def is_gone() -> bool | None:
        pods = find_pods(api, kind, name)
        if not pods and api.find(path) is None:
            return True
        on_wait(f"{counted(len(pods), 'pod')} left")
        return None

    wait_until(
        f"the end of job {name}",
        is_gone,
        deadline_s=_GONE_DEADLINE_S,
        clock=api.clock,
        every_s=_EVERY_S,
    )
