"""What a job needs of a cluster, checked in one pass before anything is created."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple

from infra.words import counted
from jobs.kubernetes.manifests import AMX_LABEL, Manifest
from jobs.kubernetes.pod_size import PodSize
from jobs.kubernetes.request import TRAIN_JOB, PodOptions
from jobs.kubernetes.resources import JOB_KINDS, JobKind, core_path, dig, parse_quantity

if TYPE_CHECKING:
    from jobs.kubernetes.api import KubernetesApi

_CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
# Volumes that one node at a time can mount, by the usual provisioners' names.
_BLOCK = (
    "ebs.csi.aws.com",
    "pd.csi.storage.gke.io",
    "disk.csi.azure.com",
    "cinder.csi.openstack.org",
)
_LOCAL = ("rancher.io/local-path", "k8s.io/minikube-hostpath", "kubernetes.io/no-provisioner")
_MANY = "ReadWriteMany"


class PreflightFinding(NamedTuple):
    """Something that stops the job, or, as a warning, may do so."""

    text: str
    fix: str
    is_warning: bool = False

    def __str__(self) -> str:
        return f"{self.text}\n  → {self.fix}"


def find_kinds(api: KubernetesApi) -> tuple[JobKind, ...]:
    """Return the kinds of jobs that the cluster serves, the preferred one first."""
    return tuple(kind for kind in JOB_KINDS if _serves(api, kind))


def _serves(api: KubernetesApi, kind: JobKind) -> bool:
    found = (api.find(kind.root) or {}).get("resources") or ()
    return any(each.get("name") == kind.plural for each in found)


@dataclass(frozen=True)
class Preflight:
    """The checks of one job. What the user may not read is not checked: the cluster decides then."""

    api: KubernetesApi
    kind: JobKind
    pods: PodOptions
    size: PodSize
    claim: Manifest | None
    """The one to create."""

    def run(self) -> list[PreflightFinding]:
        """Return everything that is wrong."""
        namespace = self.api.namespace
        if self.api.peek(f"/api/v1/namespaces/{namespace}") == {}:
            fix = f"kubectl create namespace {namespace}, or --namespace NAME"
            return [PreflightFinding(f"namespace {namespace} doesn't exist", fix)]
        checks = (
            self._check_runtime,
            self._check_rights,
            self._check_quota,
            self._check_claim,
            self._check_nodes,
            self._check_image,
        )
        return [finding for check in checks for finding in check()]

    def _list(self, path: str) -> list[Manifest]:
        found = (self.api.peek(path) or {}).get("items")
        return [each for each in found or () if isinstance(each, dict)]

    def _check_runtime(self) -> Iterator[PreflightFinding]:
        if self.kind.kind != TRAIN_JOB:
            return
        runtime = f"{self.kind.root}/clustertrainingruntimes/torch-distributed"
        if self.api.peek(runtime) == {}:
            fix = "install Kubeflow Trainer's runtimes: its chart's or manifests' `runtimes` part"
            yield PreflightFinding("ClusterTrainingRuntime torch-distributed doesn't exist", fix)

    def _check_rights(self) -> Iterator[PreflightFinding]:
        wanted = [
            ("create", self.kind.group, self.kind.plural, ""),
            ("get", self.kind.group, self.kind.plural, ""),
            ("get", "", "pods", ""),
            ("list", "", "pods", ""),
            ("get", "", "pods", "log"),
        ]
        if self.claim:
            wanted.append(("create", "", "persistentvolumeclaims", ""))
        for verb, group, plural, part in wanted:
            if not self._may(verb, group, plural, part):
                name = f"{plural}/{part}" if part else plural
                where = f" in namespace {self.api.namespace}"
                fix = f"ask for a role with verb {verb} on {name}" + (
                    f" in {group}" if group else ""
                )
                yield PreflightFinding(f"you may not {verb} {name}{where}", fix)

    def _may(self, verb: str, group: str, plural: str, part: str) -> bool:
        what = {"verb": verb, "group": group, "resource": plural, "subresource": part}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {**what, "namespace": self.api.namespace}},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return dig(self.api.create(path, review), "status").get("allowed") is True

    def _check_quota(self) -> Iterator[PreflightFinding]:
        needs = self._needs()
        for quota in self._list(core_path(self.api.namespace, "resourcequotas")):
            name, status = dig(quota, "metadata").get("name"), dig(quota, "status")
            used = dig(status, "used")
            for what, most in dig(status, "hard").items():
                limit, taken = parse_quantity(most), parse_quantity(used.get(what, "0"))
                need = needs.get(what)
                if need and limit is not None and (taken or 0) + need > limit:
                    text = f"quota {name}: {what} would be exceeded: {used.get(what, 0)} of {most} used"
                    yield PreflightFinding(
                        text, "use fewer --nodes, free some, or have the quota raised"
                    )

    def _needs(self) -> dict[str, Decimal]:
        nodes = Decimal(self.pods.nodes)
        cpus, memory = nodes * self.size.cpus, nodes * (self.size.memory_gib << 30)
        needs = {"pods": nodes, f"count/{self.kind.plural}.{self.kind.group}": Decimal(1)}
        for prefix in ("", "requests.", "limits."):
            needs |= {f"{prefix}cpu": cpus, f"{prefix}memory": memory}
        if self.claim and not self._existing_claim():
            size = dig(self.claim, "spec", "resources", "requests").get("storage")
            needs["persistentvolumeclaims"] = Decimal(1)
            needs["requests.storage"] = parse_quantity(size) or Decimal(0)
        return needs

    def _existing_claim(self) -> Manifest | None:
        path = core_path(self.api.namespace, "persistentvolumeclaims", self.pods.claim.name)
        return self.api.peek(path)

    def _check_claim(self) -> Iterator[PreflightFinding]:
        name, found = self.pods.claim.name, self._existing_claim()
        if found is None:
            return
        if not found and self.claim is None:
            fix = "`kubectl get pvc` lists the claims; without --claim, a new one is made"
            yield PreflightFinding(f"claim {name} doesn't exist", fix)
        elif not found:
            yield from self._check_class()
        elif dig(found, "status").get("phase") == "Lost":
            yield PreflightFinding(
                f"claim {name} has lost its volume", "use another one: --claim NAME"
            )
        elif self.pods.nodes > 1 and _MANY not in (dig(found, "spec").get("accessModes") or ()):
            text = f"claim {name} is not {_MANY}, but pods on several nodes write to it"
            yield PreflightFinding(text, "use another one with --claim NAME, or --nodes 1")

    def _check_class(self) -> Iterator[PreflightFinding]:
        wanted, found = self.pods.claim.storage_class, self._list(_CLASSES)
        if not found and self.api.peek(_CLASSES) is None:
            return
        names = [str(dig(each, "metadata").get("name")) for each in found]
        known = f"the cluster has {', '.join(names)}" if names else "the cluster has none"
        chosen = [each for each in found if _is_chosen(each, wanted)]
        if not chosen:
            text = (
                f"storage class {wanted} doesn't exist"
                if wanted
                else "no storage class is the default"
            )
            yield PreflightFinding(text, f"{known}: --storage-class NAME, or --claim NAME")
        elif self.pods.nodes > 1 and chosen[0].get("provisioner") in (*_BLOCK, *_LOCAL):
            text = (
                f"storage class {dig(chosen[0], 'metadata').get('name')} "
                f"({chosen[0].get('provisioner')}) can't give {_MANY}, but pods on several nodes write"
            )
            yield PreflightFinding(text, f"{known}: --storage-class NAME of a shared file system")

    def _check_nodes(self) -> Iterator[PreflightFinding]:
        nodes = [
            each
            for each in self._list("/api/v1/nodes")
            if not dig(each, "spec").get("unschedulable")
        ]
        if not nodes:
            return
        if not self.pods.any_cpu:
            nodes = [
                each for each in nodes if dig(each, "metadata", "labels").get(AMX_LABEL) == "true"
            ]
            if not nodes:
                fix = "install node-feature-discovery, or run on any processor with --any-cpu"
                yield PreflightFinding(f"no node has the label {AMX_LABEL}", fix, is_warning=True)
                return
        large = [each for each in nodes if self._fits(each)]
        if len(large) < self.pods.nodes:
            text = (
                f"{len(large)} of {counted(len(nodes), 'suitable node')} can have a pod of "
                f"{self.size.cpus} CPUs and {self.size.memory_gib} GiB, and the job has "
                f"{counted(self.pods.nodes, 'pod')}"
            )
            fix = "describe the nodes with --cores, --threads-per-core, and --memory, or use fewer --nodes"
            yield PreflightFinding(text, fix, is_warning=True)

    def _fits(self, node: Manifest) -> bool:
        has = dig(node, "status", "allocatable")
        cpus, memory = parse_quantity(has.get("cpu")), parse_quantity(has.get("memory"))
        enough = cpus is not None and cpus >= self.size.cpus
        return enough and memory is not None and memory >= self.size.memory_gib << 30

    def _check_image(self) -> Iterator[PreflightFinding]:
        secret = self.pods.pull_secret
        if secret and self.api.peek(core_path(self.api.namespace, "secrets", secret)) == {}:
            fix = f"kubectl create secret docker-registry {secret} --docker-server=… --docker-username=…"
            yield PreflightFinding(f"pull secret {secret} doesn't exist", fix)
        if "/" not in self.pods.image:
            text = (
                f"image {self.pods.image} names no registry: only nodes that have it can start it"
            )
            fix = "push it, and give its name: --image REGISTRY/NAME:TAG"
            yield PreflightFinding(text, fix, is_warning=True)


def _is_chosen(found: Manifest, wanted: str | None) -> bool:
    meta = dig(found, "metadata")
    if wanted:
        return meta.get("name") == wanted
    return dig(meta, "annotations").get(_DEFAULT_CLASS) == "true"
