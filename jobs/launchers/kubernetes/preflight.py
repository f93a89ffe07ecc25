"""Check what a job and its user need from a cluster before anything is created."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from infra.words import counted
from jobs.launchers.kubernetes.jobs import KubernetesProblem
from jobs.launchers.kubernetes.manifests import AMX_LABEL, HUB_TOKEN, Manifest
from jobs.launchers.kubernetes.request import TRAIN_JOB, JobKind, PodOptions, PodSize
from jobs.launchers.kubernetes.resources import core_path, dig, dig_list, parse_quantity

if TYPE_CHECKING:
    from jobs.launchers.kubernetes.api import KubernetesApi

_CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
# Common provisioners whose volumes only one node at a time can mount.
_BLOCK = (
    "ebs.csi.aws.com",
    "pd.csi.storage.gke.io",
    "disk.csi.azure.com",
    "cinder.csi.openstack.org",
)
_LOCAL = ("rancher.io/local-path", "k8s.io/minikube-hostpath", "kubernetes.io/no-provisioner")
MANY = "ReadWriteMany"
"""Access mode of a volume that pods on several nodes share."""


@dataclass(frozen=True)
class Preflight:
    """The checks of one job. It skips what the user has no permission to read."""

    api: KubernetesApi
    kind: JobKind
    pods: PodOptions
    size: PodSize
    claim: Manifest | None
    """The claim to create."""

    def run(self) -> list[KubernetesProblem]:
        """Return all problems."""
        namespace = self.api.namespace
        if self.api.peek(f"/api/v1/namespaces/{namespace}") == {}:
            fix = f"kubectl create namespace {namespace}, or --namespace NAME"
            return [KubernetesProblem(f"namespace {namespace} doesn't exist", fix)]
        checks = (
            self._check_runtime,
            self._check_rights,
            self._check_quota,
            self._check_claim,
            self._check_nodes,
            self._check_secrets,
            self._check_image,
        )
        return [problem for check in checks for problem in check()]

    def _list(self, path: str) -> list[Manifest]:
        return dig_list(self.api.peek(path) or {}, "items")

    def _check_runtime(self) -> Iterable[KubernetesProblem]:
        runtime = f"/apis/{self.kind.api}/clustertrainingruntimes/torch-distributed"
        if self.kind == TRAIN_JOB and self.api.peek(runtime) == {}:
            fix = "install Kubeflow Trainer's runtimes: its chart's or manifests' `runtimes` part"
            yield KubernetesProblem("ClusterTrainingRuntime torch-distributed doesn't exist", fix)

    def _check_rights(self) -> Iterable[KubernetesProblem]:
        claim = ["create persistentvolumeclaims"] if self.claim else []
        own = [self.kind.create_right, f"get {self.kind.resource}"]
        follow = ["get pods", "list pods", "get pods/log"]
        return find_missing_rights(self.api, [*own, *follow, *claim])

    def _check_quota(self) -> Iterable[KubernetesProblem]:
        needs = self._needs()
        fix = "use fewer --nodes, free some, or have the quota raised"
        for quota in self._list(core_path(self.api.namespace, "resourcequotas")):
            name, used = dig(quota, "metadata").get("name"), dig(quota, "status", "used")
            for what, most in dig(quota, "status", "hard").items():
                limit, taken = parse_quantity(most), parse_quantity(used.get(what, "0"))
                need = needs.get(what)
                if need and limit is not None and (taken or 0) + need > limit:
                    text = f"quota {name}: {what} would be exceeded: {used.get(what, 0)} of {most} used"
                    yield KubernetesProblem(text, fix)

    def _needs(self) -> dict[str, Decimal]:
        nodes = Decimal(self.pods.nodes)
        cpus, memory = nodes * self.size.cpus, nodes * (self.size.memory_gib << 30)
        needs = {"pods": nodes, f"count/{self.kind.resource}": Decimal(1)}
        for prefix in ("", "requests.", "limits."):
            needs |= {f"{prefix}cpu": cpus, f"{prefix}memory": memory}
        if self.claim and not self._existing_claim():
            size = dig(self.claim, "spec", "resources", "requests").get("storage")
            needs["persistentvolumeclaims"] = Decimal(1)
            needs["requests.storage"] = parse_quantity(size) or Decimal(0)
        return needs

    def _existing_claim(self) -> Manifest | None:
        name = self.pods.claim.name
        return self.api.peek(core_path(self.api.namespace, "persistentvolumeclaims", name))

    def _check_claim(self) -> Iterable[KubernetesProblem]:
        name, found = self.pods.claim.name, self._existing_claim()
        if found is None:
            return
        if not found and self.claim:
            yield from self._check_class()
        elif not found:
            fix = "`kubectl get pvc` lists the claims; without --claim, a new one is made"
            yield KubernetesProblem(f"claim {name} doesn't exist", fix)
        elif "deletionTimestamp" in dig(found, "metadata"):
            fix = "submit once it is gone, or use another one: --claim NAME"
            yield KubernetesProblem(
                f"claim {name} is being deleted, and no new pod can have it", fix
            )
        elif dig(found, "status").get("phase") == "Lost":
            fix = "use another one: --claim NAME"
            yield KubernetesProblem(f"claim {name} has lost its volume", fix)
        elif self.pods.nodes > 1 and MANY not in (dig(found, "spec").get("accessModes") or ()):
            text = f"claim {name} is not {MANY}, but pods on several nodes write to it"
            yield KubernetesProblem(text, "use another one with --claim NAME, or --nodes 1")

    def _check_class(self) -> Iterable[KubernetesProblem]:
        listed = self.api.peek(_CLASSES)
        if listed is None:
            return
        wanted, found = self.pods.claim.storage_class, dig_list(listed, "items")
        names = ", ".join(str(dig(each, "metadata").get("name")) for each in found)
        known = f"the cluster has {names or 'none'}"
        chosen = next((each for each in found if _is_chosen(each, wanted)), None)
        if chosen is None:
            which = f"storage class {wanted} doesn't exist"
            text = which if wanted else "no storage class is the default"
            yield KubernetesProblem(text, f"{known}: --storage-class NAME, or --claim NAME")
        elif self.pods.nodes > 1 and chosen.get("provisioner") in (*_BLOCK, *_LOCAL):
            name, provisioner = dig(chosen, "metadata").get("name"), chosen["provisioner"]
            text = f"storage class {name} ({provisioner}) can't give {MANY}, but pods on several nodes write"
            yield KubernetesProblem(text, f"{known}: --storage-class NAME of a shared file system")

    def _check_nodes(self) -> Iterable[KubernetesProblem]:
        every = self._list("/api/v1/nodes")
        nodes = [each for each in every if not dig(each, "spec").get("unschedulable")]
        wanted = self.pods.node_labels.items()
        able = [each for each in nodes if wanted <= dig(each, "metadata", "labels").items()]
        large = [each for each in able if self._fits(each)]
        if nodes and not able:
            labels = " and ".join(f"{key}={value}" for key, value in wanted)
            fix = "install node-feature-discovery, or run on any processor with --any-cpu"
            fix = fix if AMX_LABEL in self.pods.node_labels else "`kubectl get nodes --show-labels`"
            yield KubernetesProblem(f"no node has the label {labels}", fix, is_warning=True)
        elif nodes and len(large) < self.pods.nodes:
            text = (
                f"{len(large)} of {counted(len(able), 'suitable node')} can have a pod of "
                f"{counted(self.size.cpus, 'CPU')} and {self.size.memory_gib} GiB, and the job has "
                f"{counted(self.pods.nodes, 'pod')}"
            )
            fix = "describe the nodes with --cores, --threads-per-core, and --memory, or use fewer --nodes"
            yield KubernetesProblem(text, fix, is_warning=True)

    def _fits(self, node: Manifest) -> bool:
        has, needs = dig(node, "status", "allocatable"), self.size
        cpus, memory = (parse_quantity(has.get(each)) or 0 for each in ("cpu", "memory"))
        return cpus >= needs.cpus and memory >= needs.memory_gib << 30

    def _check_secrets(self) -> Iterable[KubernetesProblem]:
        pull, hub = self.pods.pull_secret, self.pods.hub_secret
        if pull and self._peek_secret(pull) == {}:
            fix = f"kubectl create secret docker-registry {pull} --docker-server=… --docker-username=…"
            yield KubernetesProblem(f"pull secret {pull} doesn't exist", fix)
        found = self._peek_secret(hub) if hub else None
        if found is not None and HUB_TOKEN not in dig(found, "data"):
            text = f"has no key {HUB_TOKEN}" if found else "doesn't exist"
            fix = f"kubectl create secret generic {hub} --from-literal={HUB_TOKEN}=…"
            yield KubernetesProblem(f"hub secret {hub} {text}", fix)

    def _peek_secret(self, name: str) -> Manifest | None:
        return self.api.peek(core_path(self.api.namespace, "secrets", name))

    def _check_image(self) -> Iterable[KubernetesProblem]:
        image = self.pods.image
        if "/" not in image:
            text = f"image {image} names no registry: only nodes that have it can start it"
            fix = "push it, and give its name: --image REGISTRY/NAME:TAG"
            yield KubernetesProblem(text, fix, is_warning=True)


def _is_chosen(storage_class: Manifest, wanted: str | None) -> bool:
    meta = dig(storage_class, "metadata")
    if wanted:
        return meta.get("name") == wanted
    return dig(meta, "annotations").get(_DEFAULT_CLASS) == "true"


def find_missing_rights(api: KubernetesApi, wanted: Iterable[str]) -> Iterator[KubernetesProblem]:
    """Yield a problem for each right that the user lacks, such as ``create pods/exec``."""
    for right in wanted:
        verb, _, what = right.partition(" ")
        what, _, group = what.partition(".")
        resource, _, part = what.partition("/")
        asked = {"verb": verb, "group": group, "resource": resource, "subresource": part}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {**asked, "namespace": api.namespace}},
        }
        answer = api.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
        if dig(answer, "status").get("allowed") is not True:
            fix = f"request a role with verb {verb} on {what}" + (f" in {group}" if group else "")
            yield KubernetesProblem(f"you may not {verb} {what} in namespace {api.namespace}", fix)
