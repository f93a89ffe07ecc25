"""A job's Kubernetes objects (a claim, and a TrainJob or PyTorchJob), and their commented YAML. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jobs.places.environment import CCL_SETUP, rank_environment
from jobs.places.kubernetes.image import CODE, USER, build_files, find_preloads
from jobs.places.kubernetes.request import CLAIM_PATH, TRAIN_JOB, PodOptions, PodSize, place_pod
from jobs.places.placement import NodeShape, Placement
from jobs.places.plan import JobPlan
from jobs.worker.runtime.events import MARK, mark_of
from provision.stacks.stack import Stack

LABEL = "app.kubernetes.io/managed-by"
MANAGER = "spr-cluster"
STACK = "spr-cluster/stack"
"""Annotation that names a job's stack."""
AMX_LABEL = "feature.node.kubernetes.io/cpu-cpuid.AMXBF16"
RETRIES = 3
_CLAIM_SIZE = "100Gi"
# A mesh's proxy in the pods breaks the ranks' connections, and keeps pods alive that have ended.
# https://github.com/kubeflow/trainer/issues/2794
_POD_METADATA: dict[str, Any] = {"labels": {"sidecar.istio.io/inject": "false"}}
# torchrun passes kubelet's SIGTERM on; all ranks stop after the same step and save a checkpoint.
# Nothing here knows how long that takes, and pods that are ready sooner end sooner.
_SAVE_SECONDS = 600
_GRACE_SECONDS = _SAVE_SECONDS + 30
# Otherwise oneCCL asks Hydra for the local rank. The worker sets it.
# https://github.com/huggingface/accelerate/pull/2339
_CCL_WITHOUT_MPIRUN = {"CCL_PROCESS_LAUNCHER": "none"}


Manifest = dict[str, Any]
# Pods meet the level "restricted": https://kubernetes.io/docs/concepts/security/pod-security-standards/
POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
_WORKSPACE_MOUNT = {"name": "workspace", "mountPath": CLAIM_PATH}


def render_claim(pods: PodOptions) -> Manifest | None:
    """Return the new claim; ``None`` if the job uses an existing one."""
    if pods.claim:
        return None
    spec: Manifest = {
        "accessModes": ["ReadWriteMany" if pods.nodes > 1 else "ReadWriteOnce"],
        "resources": {"requests": {"storage": _CLAIM_SIZE}},
    }
    metadata = {**_metadata(pods), "name": pods.claim_name}
    kind = "PersistentVolumeClaim"
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "spec": spec}


def render_job(
    plan: JobPlan, placement: Placement, size: PodSize, pods: PodOptions, stack: Stack
) -> Manifest:
    """Return the job's manifest, of the kind that ``pods`` names."""
    env = _environment(pods.name, plan, placement, stack)
    resources = {"cpu": str(size.cpus), "memory": f"{size.memory_gib}Gi"}
    container = {
        "image": pods.image,
        **_command(plan),
        "env": [{"name": n, "value": v} for n, v in env.items()],
        "resources": {"requests": resources, "limits": resources},
    }
    render_spec = _train_job_spec if pods.kind == TRAIN_JOB else _pytorch_job_spec
    return {
        "apiVersion": pods.kind.api,
        "kind": pods.kind.name,
        "metadata": {**_metadata(pods), "annotations": {STACK: stack.name}},
        "spec": render_spec(container, placement.nproc_per_node, size, pods),
    }


def _command(plan: JobPlan) -> Manifest:
    args = ["-m", plan.module, *plan.argv]
    if plan.backend != "ccl":
        return {"command": ["torchrun"], "args": args}
    script = "\n".join([*CCL_SETUP, 'exec torchrun "$@"'])
    return {"command": ["bash", "-c", script, "torchrun"], "args": args}


def _environment(name: str, plan: JobPlan, placement: Placement, stack: Stack) -> dict[str, str]:
    env = {**rank_environment(plan, placement, CODE, stack), MARK: mark_of(name)}
    env |= _CCL_WITHOUT_MPIRUN if plan.backend == "ccl" else {}
    return {
        **env,
        "HF_HOME": f"{CLAIM_PATH}/huggingface",
        # torchrun's default is 30 s. Older versions, such as 1.13 and 2.7, have no option for it.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SAVE_SECONDS),
    }


def _train_job_spec(container: Manifest, nproc: int, size: PodSize, pods: PodOptions) -> Manifest:
    pod = _pod_spec(pods, size, {"name": "node"})
    template = {"metadata": _POD_METADATA, "spec": pod}
    patch = {"name": "node", "template": {"spec": {"template": template}}}
    trainer = {"numNodes": pods.nodes, "numProcPerNode": nproc, **container}
    trainer["resourcesPerNode"] = trainer.pop("resources")
    return {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": trainer,
        "runtimePatches": [
            {
                "manager": MANAGER,
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
            }
        ],
    }


def _pytorch_job_spec(container: Manifest, nproc: int, size: PodSize, pods: PodOptions) -> Manifest:
    pod = _pod_spec(pods, size, {"name": "pytorch", **container})
    replica = {
        "restartPolicy": "OnFailure",
        "template": {"metadata": _POD_METADATA, "spec": pod},
    }
    roles = {"Master": 1, "Worker": pods.nodes - 1}
    # The operator adds up the restarts of all pods, and fails the job when the sum reaches the limit.
    # https://github.com/kubeflow/trainer/blob/release-1.9/pkg/core/job.go
    limit = RETRIES * pods.nodes + 1
    return {
        "nprocPerNode": str(nproc),
        # From release 1.9.4 on, a failed job's pods would otherwise go on restarting.
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": limit},
        "pytorchReplicaSpecs": {
            role: {"replicas": count, **replica} for role, count in roles.items() if count
        },
    }


def _pod_spec(pods: PodOptions, size: PodSize, container: Mapping[str, Any]) -> Manifest:
    mounts = [_WORKSPACE_MOUNT, {"name": "shm", "mountPath": "/dev/shm"}]
    spec: Manifest = {
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "securityContext": POD_SECURITY,
        "containers": [
            {**container, "securityContext": CONTAINER_SECURITY, "volumeMounts": mounts}
        ],
        "volumes": [
            _workspace(pods),
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{size.shm_gib}Gi"}},
        ],
    }
    if pods.kind != TRAIN_JOB:
        # Trainer's runtime patches have no such field.
        spec["automountServiceAccountToken"] = False
    if pods.node_labels:
        spec["nodeSelector"] = {**pods.node_labels}
    return spec


def render_copy_pod(pods: PodOptions) -> Manifest:
    """Return a pod for ``kubectl cp`` to and from the claim; it ends after a day."""
    container = {
        "name": "copy",
        "image": pods.image,
        "command": ["sleep", "86400"],
        # A namespace with a quota refuses pods without them.
        "resources": {
            "requests": {"cpu": "50m", "memory": "64Mi"},
            "limits": {"cpu": "1", "memory": "1Gi"},
        },
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [_WORKSPACE_MOUNT],
    }
    spec: Manifest = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": [_workspace(pods)],
    }
    if pods.node_labels and pods.nodes == 1 and not pods.claim:
        # A disk is created in the zone of its first pod.
        spec["nodeSelector"] = {**pods.node_labels}
    metadata = {**_metadata(pods), "name": "copy"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _workspace(pods: PodOptions) -> Manifest:
    return {"name": "workspace", "persistentVolumeClaim": {"claimName": pods.claim_name}}


def _metadata(pods: PodOptions) -> Manifest:
    metadata: Manifest = {"name": pods.name, "labels": {LABEL: MANAGER}}
    return metadata | ({"namespace": pods.namespace} if pods.namespace else {})


_WIDTH = 100
# What kubectl's go-yaml may take for a number, date, boolean, or null. PyYAML, which knows another version of
# YAML, leaves 1e3 and y without quotes. https://github.com/kubernetes-sigs/yaml/blob/master/goyaml.v2/resolve.go
_NO_STRING = re.compile(
    r"[-+]?[._]*([0-9][0-9a-fox_:.,+t z-]*|inf|nan)|~|=|<<|null|y|yes|n|no|on|off|true|false",
    re.IGNORECASE,
)
# A key, or the name of a list item.
_LINE = re.compile(r"( *)(?:- name: (\S+)$|([\w./-]+):)")
CLAIM_COMMENTS = {
    "accessModes": "Pods on several nodes share it: the storage class must offer ReadWriteMany, as "
    "NFS, CephFS, EFS, Filestore, and Azure Files do. Block storage can only serve one node.",
}
_REFERENCE = {
    "spec": "The job of https://huggingface.co/docs/transformers/v4.37.2/en/perf_train_cpu_many, corrected. "
    "Corrected: it has no elasticPolicy. The original's (minReplicas 1, c10d, 10 restarts) also trains "
    "with one worker, with another global batch and thus another result.",
    "numProcPerNode": "Corrected: the original leaves it out, and it becomes the number of CPUs.",
    "image": "Corrected: built from pinned packages. The original leaves <image name>:<tag> open; its "
    "Dockerfile adds transformers 4.35.2 to intel/ai-workflows:torch-2.0.1-huggingface-multinode-py3.9.",
    "command": "Corrected: oneCCL's environment is loaded before the ranks start. The original leaves "
    "out what its own section on bare metal requires.",
    "args": "Corrected: the output goes to a folder of this job, where a restarted pod finds its "
    "checkpoint. The original's folder is the same for all jobs.",
    "LD_PRELOAD": "Corrected: a name that the image makes. The original's libtcmalloc.so.4.5.9 is that of "
    "one release, and its /usr/local/lib/libiomp5.so of one image; a missing library is skipped with a "
    "warning. Intel's OpenMP is preloaded only if the stack has intel-openmp.",
    "OMP_NUM_THREADS": "Corrected: the original has 56 threads per rank, on a line that a stray hyphen makes "
    "invalid YAML, and 200 CPUs per pod, regardless of the node.",
    "CCL_ATL_TRANSPORT": "Corrected: oneCCL's default is MPI, but torchrun starts the ranks, not mpirun.",
    "HF_HOME": "Corrected: one variable instead of TRANSFORMERS_CACHE, which is deprecated, and "
    "HF_DATASETS_CACHE.",
    AMX_LABEL: "Corrected: node-feature-discovery sets this label where the processor has AMX. The "
    "original's node-type: spr is set by hand; --node-selector adds such a label.",
    "shm": "Corrected: with a limit. Without one it may grow to half of the node's memory, and the pod is "
    "killed before that.",
    "restartPolicy": "Corrected: the replica's policy overrides the pod's, so there is only this one; the "
    "original also has Never in the pod.",
}


def job_comments(
    pods: PodOptions, placement: Placement, size: PodSize, *, reference: bool
) -> dict[str, str]:
    """Return the comments of a job's manifest by the key they explain."""
    comments = {
        "numProcPerNode": "Unset, it would become the number of CPUs.",
        "runtimeRef": "Part of Kubeflow Trainer. Its own image is for CUDA.",
        "image": "Built from the Dockerfile; pushed to a registry that the nodes reach.",
        "args": "A restarted pod resumes from the newest checkpoint of this output folder.",
        "LD_PRELOAD": "tcmalloc, by a name that the image makes.",
        "command": "oneCCL's environment is loaded before the ranks start.",
        "CCL_ATL_TRANSPORT": "Not MPI: torchrun starts the ranks, not mpirun.",
        "CCL_PROCESS_LAUNCHER": "Likewise: oneCCL would ask mpirun for the ranks' places.",
        "HF_HOME": "The hub's models and data are kept on the claim.",
        AMX_LABEL: "Set by node-feature-discovery where the processor has AMX.",
        "shm": "For oneCCL and other libraries; part of the pod's memory. The runtime's own has 64 MiB.",
        "restartPolicy": "It overrides a policy in the pod's own specification.",
        "backoffLimit": "Restarts of all pods together. After a failure, all restart; this permits "
        f"{RETRIES} failures.",
        "sidecar.istio.io/inject": "Ranks can't connect through a mesh's proxy.",
        "limits": "Equal to the requests, in whole CPUs: QoS class Guaranteed, so that a node with the "
        "static CPU manager gives the pod exclusive cores. "
        f"The rest of {pods.shape.memory_gib} GiB is for the system, kubelet, and its eviction threshold.",
        "terminationGracePeriodSeconds": "Time for a checkpoint after a request to stop.",
        "workspace": f"Holds {CLAIM_PATH}/data, the hub's cache, and {pods.folder}.",
        "seccompProfile": "With this and the container's settings, the pod meets the Pod Security level "
        "restricted.",
        "automountServiceAccountToken": "The job does not call the cluster's API.",
        "fsGroup": "So that the image's user may write to the claim. Not all kinds of storage obey.",
    }
    comments |= _REFERENCE if reference else {}
    placed = _describe_placement(pods.shape, placement, size)
    comments["OMP_NUM_THREADS"] = f"{placed} {comments.get('OMP_NUM_THREADS', '')}".strip()
    if placement.backend != "ccl":
        del comments["command"]
    if pods.kind != TRAIN_JOB and pods.nodes > 1:
        unless = (
            "init container in workers, unless --pytorch-init-container-template-file changes it."
        )
        comments["limits"] += f" Training Operator prevents this with its {unless}"
        comments["seccompProfile"] += f" This does not hold for Training Operator's {unless}"
    comments["nprocPerNode"] = comments["numProcPerNode"]
    return comments


def _describe_placement(shape: NodeShape, placement: Placement, size: PodSize) -> str:
    ranks, workers = placement.nproc_per_node, placement.ccl_workers
    threads = placement.omp_threads
    each = f"({threads} + {workers} for oneCCL)" if workers else str(threads)
    return (
        f"{ranks} x {each} = {ranks * (threads + workers)} of a node's {shape.cores} cores, "
        f"{size.cpus} CPUs with {shape.threads_per_core} to a core; the others are for the node itself. "
        "Each rank finds the pod's cores and takes its own."
    )


class _Dumper(yaml.SafeDumper):
    """Writes no anchors for repeated values, multi-line strings as blocks, and ambiguous ones with quotes."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if _NO_STRING.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


def render_yaml(manifest: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """Return the manifest as YAML. ``comments`` are by key, or by ``name`` in a list; each appears once,
    above its first occurrence."""
    left, lines = dict(comments), []
    for line in yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, width=_WIDTH).splitlines():
        found = _LINE.match(line)
        if found and (comment := left.pop(found[2] or found[3], "")):
            indent = f"{found[1]}# "
            width = _WIDTH - len(indent)
            text = textwrap.fill(comment, width, break_on_hyphens=False, break_long_words=False)
            lines.append(textwrap.indent(text, indent))
        lines.append(line)
    return "\n".join([*lines, ""])


@dataclass(frozen=True)
class Rendered:
    """A job on Kubernetes. ``claim`` is ``None`` if the job uses an existing one."""

    plan: JobPlan
    pods: PodOptions
    placement: Placement
    size: PodSize
    claim: Manifest | None
    job: Manifest
    build: Mapping[str, Path | bytes]
    """The files of the image's build folder."""

    @property
    def manifests(self) -> list[Manifest]:
        """The objects to create, in this order."""
        return [each for each in (self.claim, self.job) if each is not None]

    @property
    def dockerfile(self) -> str:
        text = self.build["Dockerfile"]
        assert isinstance(text, bytes)
        return text.decode()

    @property
    def is_reference(self) -> bool:
        """Whether the job runs transformers' script, which has its own results and metrics."""
        return self.plan.module == "worker.program"

    def yaml_files(self) -> dict[str, str]:
        """Return the manifests as commented YAML, by file name."""
        comments = job_comments(self.pods, self.placement, self.size, reference=self.is_reference)
        claim = {"claim.yaml": render_yaml(self.claim, CLAIM_COMMENTS)} if self.claim else {}
        return {**claim, "job.yaml": render_yaml(self.job, comments)}

    def copy_yaml(self) -> str:
        """Return the pod for ``kubectl cp`` as YAML."""
        return render_yaml(render_copy_pod(self.pods), {})


def render(plan: JobPlan, pods: PodOptions, stack: Stack) -> Rendered:
    """Return a plan's image, claim, and job. Raises :class:`UsageError` for nodes that don't fit it."""
    placement, size = place_pod(
        pods.shape, plan.spec.resources.placement, plan.backend, find_preloads(stack)
    )
    # Only the published recipe runs transformers' example; GitHub may be out of reach.
    in_image = (
        stack if plan.module == "worker.program" else stack.model_copy(update={"examples": ""})
    )
    return Rendered(
        plan=plan,
        pods=pods,
        placement=placement,
        size=size,
        claim=render_claim(pods),
        job=render_job(plan, placement, size, pods, stack),
        build=build_files(in_image, pods.image, plan.packages.lines if plan.packages else ()),
    )
