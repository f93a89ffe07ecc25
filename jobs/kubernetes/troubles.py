"""Why a job does not run, from its pods, conditions, and events: one line each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jobs.kubernetes.manifests import Manifest
from jobs.kubernetes.resources import JobView, PodView, as_int, dig

_IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
_STARTING = {"", "ContainerCreating", "PodInitializing"}
_SIGKILL = 137


class Trouble(NamedTuple):
    """What is wrong, and what to do about it; ``fix`` may be empty."""

    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.text}\n  → {self.fix}" if self.fix else self.text


def find_troubles(
    job: JobView, pods: Sequence[PodView], events: Sequence[Manifest]
) -> list[Trouble]:
    """Return why a job waits or has failed, each reason once: many pods may have the same."""
    found = [trouble for pod in pods for trouble in (explain_pod(pod),) if trouble]
    if not pods:
        # Whoever makes the pods says only in an event why it can't.
        found += [_explain_event(event) for event in events[-1:]]
    if not found:
        failed = [each for each in job.conditions if each.type == "Failed"]
        found = [Trouble(_line(each.message) or each.reason) for each in failed]
    return list(dict.fromkeys(found))


def select_events(items: Sequence[Manifest], job: str) -> list[Manifest]:
    """Return the warnings about a job and what belongs to it, the newest last."""
    about = [
        each
        for each in items
        if each.get("type") == "Warning"
        and f"{dig(each, 'involvedObject').get('name')}-".startswith(f"{job}-")
    ]
    return sorted(about, key=lambda each: str(each.get("lastTimestamp") or each.get("eventTime")))


def explain_pod(pod: PodView) -> Trouble | None:
    """Return why a pod does not run or has failed."""
    status = dig(pod.raw, "status")
    if status.get("reason") == "Evicted":
        why = _line(status.get("message"))
        fix = "the job's operator may start it again; describe smaller nodes with --memory"
        return Trouble(f"pod {pod.name} was evicted from node {pod.node}: {why}", fix)
    for each in status.get("conditions") or ():
        if each.get("reason") == "Unschedulable" and each.get("status") == "False":
            return _explain_unschedulable(pod.name, _line(each.get("message")))
        if each.get("type") == "DisruptionTarget" and each.get("status") == "True":
            return Trouble(f"pod {pod.name} was removed: {_line(each.get('message'))}")
    for each in status.get("containerStatuses") or ():
        if trouble := _explain_container(pod, each):
            return trouble
    if pod.phase == "Failed":
        return Trouble(f"pod {pod.name} failed: {_line(status.get('message') or '')}".rstrip(": "))
    return None


def exit_code(pod: PodView) -> int | None:
    """Return a pod's exit code, once it has ended."""
    for each in dig(pod.raw, "status").get("containerStatuses") or ():
        if ended := dig(each, "state", "terminated"):
            return as_int(ended.get("exitCode"))
    return None


def _explain_unschedulable(pod: str, message: str) -> Trouble:
    no_label = "no node has the label for AMX: install node-feature-discovery, or use --any-cpu"
    fixes = {
        "selector": no_label,
        "pod's node affinity": no_label,  # Kubernetes 1.20
        "insufficient": "describe the nodes with --cores, --numa, --threads-per-core, and --memory",
        "persistentvolumeclaim": "`kubectl describe pvc` says why the claim has no volume",
    }
    fix = next((fixes[word] for word in fixes if word in message.lower()), "")
    return Trouble(f"no node can take pod {pod}: {message}", fix)


def _explain_container(pod: PodView, found: dict[str, Any]) -> Trouble | None:
    waiting, ended = dig(found, "state", "waiting"), dig(found, "state", "terminated")
    reason = str(waiting.get("reason") or "")
    if reason in _IMAGE:
        return Trouble(
            f"pod {pod.name}: image {found.get('image')} can't be pulled: {_line(waiting.get('message'))}",
            "push it to a registry that the nodes reach; --pull-secret if that needs a login",
        )
    if reason == "CrashLoopBackOff":
        ended = dig(found, "lastState", "terminated") or ended
    elif reason not in _STARTING:
        return Trouble(f"pod {pod.name} can't start: {reason}: {_line(waiting.get('message'))}")
    return _explain_end(pod, ended)


def _explain_end(pod: PodView, ended: Manifest) -> Trouble | None:
    code = as_int(ended.get("exitCode"))
    if ended.get("reason") == "OOMKilled":
        return Trouble(
            f"pod {pod.name} was killed on node {pod.node}: its memory ran out",
            "give it nodes with more --memory, or use a smaller --batch-size",
        )
    if not code:
        return None
    killed = " (killed)" if code == _SIGKILL else ""
    return Trouble(f"pod {pod.name} ended with exit code {code}{killed}")


def _explain_event(event: Manifest) -> Trouble:
    message = _line(event.get("message"))
    fix = "ask for less, or have the quota raised" if "exceeded quota" in message else ""
    return Trouble(f"no pods: {message}", fix)


def _line(text: object) -> str:
    return " ".join(str(text or "").split())
