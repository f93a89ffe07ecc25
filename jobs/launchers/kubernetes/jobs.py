"""Find, follow, and delete the jobs of a namespace, and explain why they do not run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from infra.errors import DeadlineError, JobError, UsageError
from infra.wait import wait_until
from infra.words import counted
from jobs.launchers.kubernetes.errors import ForbiddenError
from jobs.launchers.kubernetes.manifests import Manifest
from jobs.launchers.kubernetes.pod_log import PodLog
from jobs.launchers.kubernetes.request import JOB_KINDS, TRAIN_JOB, JobKind
from jobs.launchers.kubernetes.resources import (
    JobView,
    PodView,
    as_int,
    claims_of,
    core_path,
    dig,
    dig_list,
    parse_job,
    parse_time,
)

if TYPE_CHECKING:
    from jobs.launchers.kubernetes.api import KubernetesApi


_IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
_STARTING = {"", "ContainerCreating", "PodInitializing"}
_SIGKILL = 137
# The interface between kubelet and the container runtime.
_RPC = re.compile(r"^rpc error: code = \w+ desc = ")
_NO_LABEL = "no node has the labels: install node-feature-discovery, or use --any-cpu"
# By a word in the scheduler's message.
_UNSCHEDULABLE = {
    "selector": _NO_LABEL,
    "pod's node affinity": _NO_LABEL,  # Kubernetes 1.20
    "insufficient": "describe the nodes with --cores, --numa, --threads-per-core, and --memory",
    "persistentvolumeclaim": "`kubectl describe pvc` says why the claim has no volume",
}


class KubernetesProblem(NamedTuple):
    """A problem and its fix, which may be empty. A warning does not stop the job."""

    text: str
    fix: str = ""
    is_warning: bool = False

    def __str__(self) -> str:
        return f"{self.text}\n  → {self.fix}" if self.fix else self.text


def refuse(found: Iterable[KubernetesProblem]) -> None:
    """Raise :class:`UsageError` with all problems, if there are any."""
    problems = [*found]
    if len(problems) == 1:
        raise UsageError(problems[0].text, hint=problems[0].fix)
    if problems:
        lines = "\n".join(f"  {each.text}\n    → {each.fix}" for each in problems)
        raise UsageError(f"{counted(len(problems), 'problem')}; nothing was created:\n{lines}")


def find_problems(job: JobView, events: Sequence[Manifest]) -> list[KubernetesProblem]:
    """Return why a job is waiting or has failed, each reason once even if many pods share it.

    ``events`` are warnings, the newest last; those of an earlier job with this name do not count.
    """
    found = _explain_pods(job.pods)
    recent = [each for each in events if not _is_older(each, job)]
    if recent and not job.pods:
        # The controller reports pod-creation failures only as events.
        message = _line(recent[-1].get("message"))
        fix = "request less, or have the quota raised" if "exceeded quota" in message else ""
        found.append(KubernetesProblem(f"no pods: {message}", fix))
    if not found:
        failed = [each for each in job.conditions if each.type == "Failed"]
        found = [KubernetesProblem(_line(each.message) or each.reason) for each in failed]
    return found


def _explain_pods(pods: Iterable[PodView]) -> list[KubernetesProblem]:
    groups: dict[KubernetesProblem, list[KubernetesProblem]] = {}
    for pod in pods:
        if problem := explain_pod(pod):
            alike = problem._replace(text=problem.text.replace(pod.name, ""))
            groups.setdefault(alike, []).append(problem)
    return [
        first._replace(text=f"{first.text} (and {counted(len(others), 'other pod')})")
        if others
        else first
        for first, *others in groups.values()
    ]


def _is_older(event: Manifest, job: JobView) -> bool:
    at = parse_time(_event_time(event))
    return bool(at and job.created and at < job.created)


def select_warnings(events: Sequence[Manifest], about: JobView | PodView) -> list[Manifest]:
    """Return the warnings about a pod, or about a job and its pods' owners, the newest last."""
    parts = _parts(about) if isinstance(about, JobView) else ()
    found = []
    for each in events:
        what = dig(each, "involvedObject")
        is_part = (what.get("kind"), what.get("name")) in parts
        if each.get("type") == "Warning" and (is_part or what.get("uid") == about.uid):
            found.append(each)
    return sorted(found, key=_event_time)


def _parts(job: JobView) -> Sequence[tuple[str, str]]:
    """Return the kinds and names of the objects that own a job's pods: Trainer adds a JobSet and Jobs."""
    return (("JobSet", job.name), ("Job", f"{job.name}-node-0")) if job.kind == TRAIN_JOB else ()


def _event_time(event: Manifest) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime"))


def explain_pod(pod: PodView) -> KubernetesProblem | None:
    """Return why a pod is not running or has failed."""
    status = dig(pod.raw, "status")
    message = _line(status.get("message"))
    if status.get("reason") == "Evicted":
        fix = "the job's operator may start it again; describe smaller nodes with --memory"
        text = f"pod {pod.name} was evicted from node {pod.node}: {message}"
        return KubernetesProblem(text, fix)
    for each in dig_list(status, "conditions"):
        why = _line(each.get("message"))
        if each.get("reason") == "Unschedulable" and each.get("status") == "False":
            words = (word for word in _UNSCHEDULABLE if word in why.lower())
            fix = _UNSCHEDULABLE.get(next(words, ""), "")
            return KubernetesProblem(f"no node can take pod {pod.name}: {why}", fix)
        if each.get("type") == "DisruptionTarget" and each.get("status") == "True":
            return KubernetesProblem(f"pod {pod.name} was removed: {why}")
    for each in pod.statuses:
        if problem := _explain_container(pod, each):
            return problem
    if pod.phase == "Failed":
        return KubernetesProblem(f"pod {pod.name} failed: {message}".rstrip(": "))
    return None


def _explain_container(pod: PodView, found: Manifest) -> KubernetesProblem | None:
    waiting, ended = dig(found, "state", "waiting"), dig(found, "state", "terminated")
    reason = str(waiting.get("reason") or "")
    message = _RPC.sub("", _line(waiting.get("message")))
    if reason in _IMAGE:
        return KubernetesProblem(
            f"pod {pod.name}: image {found.get('image')} can't be pulled: {message}",
            "push it to a registry that the nodes reach; --pull-secret if that needs a login",
        )
    if reason == "CrashLoopBackOff":
        ended = dig(found, "lastState", "terminated") or ended
    elif reason not in _STARTING:
        return KubernetesProblem(f"pod {pod.name} can't start: {reason}: {message}")
    if ended.get("reason") == "OOMKilled":
        return KubernetesProblem(
            f"pod {pod.name} was killed on node {pod.node}: its memory ran out",
            "give it nodes with more --memory, or use a smaller --batch-size",
        )
    code = as_int(ended.get("exitCode"))
    killed = " (killed)" if code == _SIGKILL else ""
    return (
        KubernetesProblem(f"pod {pod.name} ended with exit code {code}{killed}") if code else None
    )


def exit_code(pod: PodView) -> int | None:
    """Return a pod's exit code; ``None`` until it has ended."""
    ended = [dig(each, "state", "terminated") for each in pod.statuses]
    return next((as_int(each.get("exitCode")) for each in ended if each), None)


def _line(text: object) -> str:
    return " ".join(str(text or "").split())


_STATES = ("running", "terminated")


def describe_record(job: JobView, context: str, namespace: str) -> dict[str, Any]:
    """Return a Kubernetes job's values for :class:`jobs.launchers.record.JobRecord`."""
    pods = [pod for index in range(job.nodes) if (pod := job.pod(index * job.node_ranks))]
    words = [[str(word) for word in job.container.get(key) or ()] for key in ("command", "args")]
    # With oneCCL, a shell runs torchrun.
    argv = [*words[0][-1:], *words[1]]
    return {
        "job": job.name,
        "kind": "squad",
        "cluster": context,
        "cloud": "kubernetes",
        "command": shlex.join(argv),
        "argv": argv,
        "nodes": [{"name": pod.node, "pod": pod.name} for pod in pods],
        "nnodes": job.nodes,
        "placement": _describe_placement(job),
        "stack": job.stack,
        "when": job.created.isoformat() if job.created else None,
        **(_describe_end(job) if job.is_over else {}),
        "more": {
            "kind": job.kind.name,
            "namespace": namespace,
            "image": job.image,
            "claim": job.claim,
        },
    }


def _describe_placement(job: JobView) -> dict[str, int]:
    env = {str(each.get("name")): each.get("value") for each in dig_list(job.container, "env")}
    return {
        "nproc_per_node": job.node_ranks,
        "omp_threads": as_int(env.get("OMP_NUM_THREADS")),
        "ccl_workers": as_int(env.get("CCL_WORKER_COUNT")),
    }


def _describe_end(job: JobView) -> dict[str, Any]:
    """Return the job's outcome and end time, if its pods still show them."""
    began, ended = find_times(job)
    codes = [code for pod in job.pods if (code := exit_code(pod)) is not None]
    return {
        "state": job.state,
        "ended": ended.isoformat() if ended else None,
        "seconds": (ended - began).total_seconds() if began and ended else None,
        "exit_code": next(filter(None, codes), 0 if codes else None),
    }


def find_times(job: JobView) -> tuple[datetime | None, datetime | None]:
    """Return when a job's first pod began and its last one ended, if they still show it."""
    states = [
        dig(each, "state", name) for pod in job.pods for each in pod.statuses for name in _STATES
    ]
    began, ended = (
        [time for each in states if (time := parse_time(each.get(key)))]
        for key in ("startedAt", "finishedAt")
    )
    return min(began, default=None), max(ended, default=None)


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
    """Yield each kind's jobs. A role for one kind is enough: the others may be forbidden."""
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
    """Return why a job is waiting or has failed."""
    return find_problems(job, [] if job.pods else find_warnings(api, job))


def find_warnings(api: KubernetesApi, about: JobView | PodView) -> list[Manifest]:
    """Return the warnings about a job or pod, the newest last; none without permission to read them."""
    events = dig_list(api.peek(core_path(api.namespace, "events")) or {}, "items")
    return select_warnings(events, about)


def follow_job(
    api: KubernetesApi,
    name: str,
    on_line: Callable[[str], None],
    on_problem: Callable[[KubernetesProblem], None],
    rank: int = 0,
) -> JobView:
    """Stream the log of a rank's pod and of its replacements until the job ends.

    Each reason for waiting is reported once. Raises :class:`JobError` if the job is deleted meanwhile.
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
    """Return the other jobs that use a job's claim, and pods that use it and belong to no job."""
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
    """Delete a claim and wait until it is gone. Raises :class:`DeadlineError`."""
    path = core_path(api.namespace, "persistentvolumeclaims", name)
    api.delete(path)

    def is_gone() -> bool | None:
        # Without permission to read it, waiting is impossible.
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
    """Delete a job and wait until its pods are gone; ``at_once`` kills them.

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
