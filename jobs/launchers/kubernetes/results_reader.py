"""Fetch a job's files from its claim, through a temporary pod."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infra.errors import DeadlineError, JobError, UsageError
from infra.wait import wait_until
from jobs.launchers.files import unpack_results
from jobs.launchers.kubernetes.errors import KubernetesError
from jobs.launchers.kubernetes.jobs import explain_pod, find_warnings, refuse
from jobs.launchers.kubernetes.manifests import (
    CONTAINER_SECURITY,
    LABEL,
    MANAGER,
    POD_SECURITY,
    Manifest,
)
from jobs.launchers.kubernetes.preflight import MANY, find_missing_rights
from jobs.launchers.kubernetes.request import CLAIM_PATH
from jobs.launchers.kubernetes.resources import PodView, claims_of, core_path, dig, parse_pod
from jobs.worker.storage.ownership import OUTPUT, RANK_FILES

if TYPE_CHECKING:
    from jobs.launchers.kubernetes.api import KubernetesApi

_START_DEADLINE_S = 300.0
# If this process is killed, the pod ends by itself.
_LIFE_S = 3600
_TRIES = 3
_CONTAINER = "reader"
_KEPT = ("imagePullSecrets", "tolerations")
# exec over a WebSocket is a GET; since Kubernetes 1.35, it also requires the verb create.
_RIGHTS = ("create pods", "get pods", "delete pods", "create pods/exec", "get pods/exec")
# Our checkpoints stay on the claim, as they stay on the nodes of a cluster of machines. Code 1 means that a
# file changed while it was read: the job is still running.
_TAR = f'cd "$1" && {{ tar -cf - {OUTPUT} $(ls -d {" ".join(RANK_FILES)} 2>/dev/null) || test $? -eq 1; }}'


@dataclass(frozen=True)
class ResultsReader:
    """Reads a job's files from a claim, in a pod with an image that has ``tar``."""

    api: KubernetesApi
    job: str
    claim: str
    image: str
    spec: Manifest
    """The pod specification of the job, if known, for its user and pull secret."""
    note: Callable[[str], None]
    warn: Callable[[str], None]

    def find_holder(self) -> PodView | None:
        """Return the pod that uses, or last used, a claim that only one node at a time can mount.

        Raises :class:`UsageError` if the files can't be read, before anything is created.
        """
        refuse(find_missing_rights(self.api, _RIGHTS))
        namespace = self.api.namespace
        claim = self.api.peek(core_path(namespace, "persistentvolumeclaims", self.claim))
        if claim == {}:
            raise UsageError(f"claim {self.claim} doesn't exist", hint="--claim NAME names another")
        modes = dig(claim or {}, "spec").get("accessModes") or (MANY,)
        every = self.api.items(core_path(namespace, "pods"))
        held = [parse_pod(pod) for pod in every if self.claim in claims_of(dig(pod, "spec"))]
        found = [pod for pod in held if pod.node]
        if MANY in modes or not found:
            return None
        holder = max(found, key=lambda pod: (not pod.is_over, pod.created))
        if "ReadWriteOncePod" in modes and not holder.is_over:
            raise UsageError(
                f"claim {self.claim} serves one pod at a time, and pod {holder.name} has it",
                hint="fetch once the job has ended",
            )
        return holder

    def fetch(self, holder: PodView | None, target: Path) -> None:
        """Download the job's output into a folder. Raises :class:`KubernetesError` if that fails."""
        with self._run_pod(holder) as pod:
            for rest in reversed(range(_TRIES)):
                try:
                    chunks = self.api.run(pod, _CONTAINER, self._command)
                    unpack_results(chunks, target, self.job, self.note)
                    return
                except (KubernetesError, JobError) as error:
                    if not rest or (isinstance(error, KubernetesError) and error.status):
                        raise
                    self.note(f"trying again: {error.message}")

    @property
    def _command(self) -> list[str]:
        return ["sh", "-c", _TAR, "sh", f"{CLAIM_PATH}/jobs/{self.job}"]

    @contextmanager
    def _run_pod(self, holder: PodView | None) -> Iterator[str]:
        """Run a pod that mounts the claim, and yield the pod's path; always delete the pod."""
        name = f"{self.job}-reader-{secrets.token_hex(2)}"
        pods = core_path(self.api.namespace, "pods")
        try:
            self.api.create(pods, self._render_pod(name, holder))
            self._wait_until_running(f"{pods}/{name}", holder)
            yield f"{pods}/{name}"
        finally:
            self._delete(name)

    def _delete(self, name: str) -> None:
        api = self.api
        try:
            api.delete(core_path(api.namespace, "pods", name), {"gracePeriodSeconds": "0"})
        except KubernetesError as error:
            # This error must hide neither the fetched files nor an earlier error.
            command = f"kubectl --context {api.context} -n {api.namespace} delete pod {name}"
            self.warn(f"warning: pod {name} may be left: {error.message}\n  → {command}")

    def _wait_until_running(self, path: str, holder: PodView | None) -> None:
        name, reason = path.rpartition("/")[2], ""
        pod: PodView | None = None

        def is_running() -> bool | None:
            nonlocal reason, pod
            pod = parse_pod(self.api.get(path))
            problem = explain_pod(pod)
            reason = problem.text if problem else ""
            # It may still be scheduled.
            if pod.is_over or (problem and pod.node):
                hint = problem.fix if problem else None
                raise KubernetesError(reason or f"pod {name} ended too early", hint=hint)
            if pod.phase == "Running":
                return True
            self.note(reason or f"waiting for pod {name}")
            return None

        try:
            what, clock = f"the start of pod {name}", self.api.clock
            wait_until(what, is_running, deadline_s=_START_DEADLINE_S, clock=clock)
        except DeadlineError as error:
            # The scheduler reports the cause in the pod; kubelet, which mounts volumes, only in events.
            warnings = find_warnings(self.api, pod) if pod else []
            events = [str(each.get("message")) for each in warnings]
            reason = (
                reason or " ".join("".join(events[-1:]).split()) or "the cluster does not say why"
            )
            raise DeadlineError(f"{error.message}: {reason}", hint=_advise(holder)) from error

    def _render_pod(self, name: str, holder: PodView | None) -> Manifest:
        resources = {"cpu": "500m", "memory": "256Mi"}
        container = {
            "name": _CONTAINER,
            "image": self.image,
            "command": ["sleep", str(_LIFE_S)],
            "resources": {"requests": resources, "limits": resources},
            "securityContext": CONTAINER_SECURITY,
            "volumeMounts": [{"name": "workspace", "mountPath": CLAIM_PATH, "readOnly": True}],
        }
        volume = {"name": "workspace", "persistentVolumeClaim": {"claimName": self.claim}}
        spec = {
            **{key: self.spec[key] for key in _KEPT if key in self.spec},
            # The job's user can read its files.
            "securityContext": {**POD_SECURITY, **dig(self.spec, "securityContext")},
            "automountServiceAccountToken": False,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": _LIFE_S,
            "containers": [container],
            "volumes": [volume],
        }
        if holder:
            spec["affinity"] = {"nodeAffinity": _beside(holder)}
        metadata = {"name": name, "labels": {LABEL: MANAGER}}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _advise(holder: PodView | None) -> str:
    if holder is None or holder.is_over:
        return "try again once the cluster has room for a small pod"
    where = f"its claim serves one node at a time, now {holder.node}, where pod {holder.name} runs"
    return f"{where}: fetch once the job has ended"


def _beside(holder: PodView) -> Manifest:
    """Return the affinity to a pod's node: required while that pod runs, preferred afterward."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [holder.node]}]}
    if holder.is_over:
        weighed = {"weight": 100, "preference": term}
        return {"preferredDuringSchedulingIgnoredDuringExecution": [weighed]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
