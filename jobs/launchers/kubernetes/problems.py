"""What keeps a job from running: found before it starts, or in its pods, conditions, and events. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from infra.errors import UsageError
from infra.words import counted
from jobs.launchers.kubernetes.kinds import TRAIN_JOB
from jobs.launchers.kubernetes.manifests import Manifest
from jobs.launchers.kubernetes.resources import JobView, PodView, as_int, dig, dig_list, parse_time

_IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
_STARTING = {"", "ContainerCreating", "PodInitializing"}
_SIGKILL = 137
# How kubelet and the container runtime speak with each other.
_RPC = re.compile(r"^rpc error: code = \w+ desc = ")
_NO_LABEL = "no node has the label for AMX: install node-feature-discovery, or use --any-cpu"
# By a word of the scheduler's message.
_UNSCHEDULABLE = {
    "selector": _NO_LABEL,
    "pod's node affinity": _NO_LABEL,  # Kubernetes 1.20
    "insufficient": "describe the nodes with --cores, --numa, --threads-per-core, and --memory",
    "persistentvolumeclaim": "`kubectl describe pvc` says why the claim has no volume",
}


class KubernetesProblem(NamedTuple):
    """What is wrong, and what to do about it; ``fix`` may be empty. A warning does not stop the job."""

    text: str
    fix: str = ""
    is_warning: bool = False

    def __str__(self) -> str:
        return f"{self.text}\n  → {self.fix}" if self.fix else self.text


def refuse(found: Iterable[KubernetesProblem]) -> None:
    """Raise :class:`UsageError` with all of them, if there are any."""
    problems = [*found]
    if len(problems) == 1:
        raise UsageError(problems[0].text, hint=problems[0].fix)
    if problems:
        lines = "\n".join(f"  {each.text}\n    → {each.fix}" for each in problems)
        raise UsageError(f"{counted(len(problems), 'problem')}; nothing was created:\n{lines}")


def find_problems(job: JobView, events: Sequence[Manifest]) -> list[KubernetesProblem]:
    """Return why a job waits or has failed, each reason once: many pods may have the same.

    ``events`` are warnings, the newest last; those of an earlier job with this name do not count.
    """
    found = _explain_pods(job.pods)
    recent = [each for each in events if not _is_older(each, job)]
    if recent and not job.pods:
        # Whoever makes the pods says only in an event why it can't.
        message = _line(recent[-1].get("message"))
        fix = "ask for less, or have the quota raised" if "exceeded quota" in message else ""
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
    """Return the warnings about a pod, or about a job and what makes its pods, the newest last."""
    parts = _parts(about) if isinstance(about, JobView) else ()
    found = []
    for each in events:
        what = dig(each, "involvedObject")
        is_part = (what.get("kind"), what.get("name")) in parts
        if each.get("type") == "Warning" and (is_part or what.get("uid") == about.uid):
            found.append(each)
    return sorted(found, key=_event_time)


def _parts(job: JobView) -> Sequence[tuple[str, str]]:
    """Return the kinds and names of what Trainer makes of a job; a PyTorchJob makes its pods itself."""
    return (("JobSet", job.name), ("Job", f"{job.name}-node-0")) if job.kind == TRAIN_JOB else ()


def _event_time(event: Manifest) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime"))


def explain_pod(pod: PodView) -> KubernetesProblem | None:
    """Return why a pod does not run or has failed."""
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
    """Return a pod's exit code, once it has ended."""
    ended = [dig(each, "state", "terminated") for each in pod.statuses]
    return next((as_int(each.get("exitCode")) for each in ended if each), None)


def _line(text: object) -> str:
    return " ".join(str(text or "").split())
