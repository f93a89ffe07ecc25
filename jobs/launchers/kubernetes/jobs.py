"""The jobs of a namespace: found, followed, and deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from infra.errors import DeadlineError, JobError, UsageError
from infra.wait import wait_until
from infra.words import counted
from jobs.launchers.kubernetes.errors import ForbiddenError
from jobs.launchers.kubernetes.kinds import JOB_KINDS, JobKind
from jobs.launchers.kubernetes.manifests import Manifest
from jobs.launchers.kubernetes.pod_log import PodLog
from jobs.launchers.kubernetes.problems import KubernetesProblem, find_problems, select_warnings
from jobs.launchers.kubernetes.resources import (
    JobView,
    PodView,
    claims_of,
    core_path,
    dig,
    dig_list,
    parse_job,
)

if TYPE_CHECKING:
    from jobs.launchers.kubernetes.api import KubernetesApi

_Found = TypeVar("_Found")
_EVERY_S = 2.0
# Pods have 150 s for a checkpoint.
_GONE_DEADLINE_S = 300.0
_CLAIM_DEADLINE_S = 60.0


def list_jobs(api: KubernetesApi) -> list[JobView]:
    """Return the jobs of the namespace, of all kinds that the cluster serves, oldest first."""
    found = []
    for kind, every in _read_kinds(api, lambda kind: api.items(kind.path(api.namespace))):
        pods = api.items(core_path(api.namespace, "pods"), kind.pod_label)
        for each in every:
            name = dig(each, "metadata").get("name")
            own = [p for p in pods if dig(p, "metadata", "labels").get(kind.pod_label) == name]
            found.append(parse_job(kind, each, own))
    return sorted(found, key=lambda job: str(job.created))


def require_kinds(api: KubernetesApi) -> tuple[JobKind, ...]:
    """Return the kinds of jobs that the cluster serves, the preferred one first.

    Raises :class:`UsageError` if there are none.
    """
    if kinds := tuple(kind for kind in JOB_KINDS.values() if _serves(api, kind)):
        return kinds
    raise UsageError(
        f"context {api.context}: the cluster has neither TrainJob nor PyTorchJob",
        hint="install Kubeflow Trainer 2.2 or newer (TrainJob), or training-operator 1.x (PyTorchJob): "
        "https://www.kubeflow.org/docs/components/trainer/operator-guides/installation/",
    )


def _read_kinds(
    api: KubernetesApi, read: Callable[[JobKind], _Found]
) -> Iterator[tuple[JobKind, _Found]]:
    """Yield what each kind has. A role for one of them is enough, so others may refuse."""
    kinds, refusals = require_kinds(api), []
    for kind in kinds:
        try:
            found = read(kind)
        except ForbiddenError as error:
            refusals.append(error)
        else:
            yield kind, found
    if len(refusals) == len(kinds):
        raise refusals[0]


def _serves(api: KubernetesApi, kind: JobKind) -> bool:
    found = dig_list(api.find(f"/apis/{kind.api}") or {}, "resources")
    return any(each.get("name") == kind.plural for each in found)


def find_job(api: KubernetesApi, name: str) -> JobView | None:
    """Return a job of either kind; ``None`` if there is none with this name."""
    for kind, found in _read_kinds(api, lambda kind: api.find(kind.path(api.namespace, name))):
        if found:
            return parse_job(kind, found, _find_pods(api, kind, name))
    return None


def require_job(api: KubernetesApi, name: str) -> JobView:
    """Return a job. Raises :class:`UsageError` if there is none with this name."""
    if found := find_job(api, name):
        return found
    raise UsageError(
        f"no job {name} in namespace {api.namespace} of context {api.context}",
        hint="`spr-cluster jobs` with --namespace and --context lists others",
    )


def _find_pods(api: KubernetesApi, kind: JobKind, name: str) -> list[Manifest]:
    return api.items(core_path(api.namespace, "pods"), f"{kind.pod_label}={name}")


def explain(api: KubernetesApi, job: JobView) -> list[KubernetesProblem]:
    """Return why a job waits or has failed."""
    return find_problems(job, [] if job.pods else find_warnings(api, job))


def find_warnings(api: KubernetesApi, about: JobView | PodView) -> list[Manifest]:
    """Return the warnings about a job or a pod, the newest last; none if they may not be read."""
    events = dig_list(api.peek(core_path(api.namespace, "events")) or {}, "items")
    return select_warnings(events, about)


def follow_job(
    api: KubernetesApi,
    name: str,
    on_line: Callable[[str], None],
    on_problem: Callable[[KubernetesProblem], None],
    rank: int = 0,
) -> JobView:
    """Pass on the log of the pod with a rank, and of those that replace it, until the job ends.

    Each reason for its wait is passed on once. Raises :class:`JobError` if it is deleted meanwhile.
    """
    done: set[str] = set()
    shown: set[KubernetesProblem] = set()
    while True:
        job = find_job(api, name)
        if job is None:
            raise JobError(
                f"job {name} was deleted before it ended",
                hint="its files are still on its claim; a new job with the same name resumes it",
            )
        pod = job.pod(rank)
        if pod and pod.uid not in done and (pod.is_over or pod.phase == "Running"):
            done.add(pod.uid)
            PodLog(api, pod, on_line).follow()
            continue
        if job.is_over:
            return job
        for problem in [each for each in explain(api, job) if each not in shown]:
            shown.add(problem)
            on_problem(problem)
        api.clock.sleep(_EVERY_S)


def find_claim_users(api: KubernetesApi, job: JobView) -> list[str]:
    """Return the other jobs that have a job's claim, and the pods of neither."""
    jobs = list_jobs(api)
    names = [each.name for each in jobs if each.claim == job.claim and each.name != job.name]
    labels = {(kind.pod_label, each.name) for kind in JOB_KINDS.values() for each in jobs}
    pods = [
        str(dig(each, "metadata").get("name"))
        for each in api.items(core_path(api.namespace, "pods"))
        if job.claim in claims_of(dig(each, "spec"))
        and not labels & dig(each, "metadata", "labels").items()
    ]
    return [f"job {each}" for each in names] + [f"pod {each}" for each in pods]


def delete_claim(api: KubernetesApi, name: str, on_wait: Callable[[str], None]) -> None:
    """Delete a claim, and wait until it is gone. Raises :class:`DeadlineError`."""
    path = core_path(api.namespace, "persistentvolumeclaims", name)
    api.delete(path)

    def is_gone() -> bool | None:
        # Whoever may not read it can't wait for it.
        if not api.peek(path):
            return True
        on_wait(f"claim {name} is being deleted")
        return None

    what = f"the end of claim {name}"
    try:
        wait_until(what, is_gone, deadline_s=_CLAIM_DEADLINE_S, clock=api.clock, every_s=_EVERY_S)
    except DeadlineError as error:
        why = f"kubectl --context {api.context} -n {api.namespace} describe pvc {name}"
        raise DeadlineError(error.message, hint=f"it goes once no pod has it: {why}") from error


def delete_job(
    api: KubernetesApi, job: JobView, on_wait: Callable[[str], None], *, at_once: bool = False
) -> None:
    """Delete a job, and wait until its pods are gone; ``at_once`` kills them.

    Raises :class:`DeadlineError`.
    """
    path = job.kind.path(api.namespace, job.name)
    api.delete(path, {"propagationPolicy": "Foreground"})
    for pod in job.pods if at_once else ():
        api.delete(core_path(api.namespace, "pods", pod.name), {"gracePeriodSeconds": "0"})

    def is_gone() -> bool | None:
        pods = _find_pods(api, job.kind, job.name)
        if not pods and api.find(path) is None:
            return True
        on_wait(f"{counted(len(pods), 'pod')} left")
        return None

    what = f"the end of job {job.name}"
    wait_until(what, is_gone, deadline_s=_GONE_DEADLINE_S, clock=api.clock, every_s=_EVERY_S)
