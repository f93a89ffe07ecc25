"""A job as Kubernetes' API takes it: a claim, and a TrainJob or PyTorchJob. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.launchers.kubernetes.image import CODE, USER
from jobs.launchers.kubernetes.kinds import TRAIN_JOB
from jobs.launchers.kubernetes.pod_size import PodSize
from jobs.launchers.kubernetes.request import CLAIM_PATH, PodOptions
from jobs.launchers.mpirun import ccl_setup, rank_environment
from jobs.launchers.placement import Placement
from jobs.launchers.plan import CHECKPOINT_SECONDS, JobPlan
from jobs.worker.runtime.events import MARK, mark_of
from provision.stacks.stack import Stack

LABEL = "app.kubernetes.io/managed-by"
MANAGER = "spr-cluster"
STACK = "spr-cluster/stack"
"""Annotation that names a job's stack."""
AMX_LABEL = "feature.node.kubernetes.io/cpu-cpuid.AMXBF16"
HUB_TOKEN = "HF_TOKEN"
"""The variable that the hub's libraries read, and the key of the secret that has it."""
RETRIES = 3
# torchrun passes kubelet's SIGTERM on; all ranks stop after the same step and save a checkpoint.
_GRACE_SECONDS = CHECKPOINT_SECONDS + 30
# oneCCL asks Hydra for a rank's place on its node otherwise. The worker adds that place.
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


def render_claim(pods: PodOptions) -> Manifest | None:
    """Return the claim; ``None`` for one that exists."""
    claim = pods.claim
    if claim.size is None:
        return None
    spec: Manifest = {
        "accessModes": ["ReadWriteMany" if pods.nodes > 1 else "ReadWriteOnce"],
        "resources": {"requests": {"storage": claim.size}},
    }
    if claim.storage_class:
        spec["storageClassName"] = claim.storage_class
    metadata = {**_metadata(pods), "name": claim.name}
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
        **_command(plan, stack),
        "env": [
            *({"name": n, "value": v} for n, v in env.items()),
            *_token(pods),
        ],
        "resources": {"requests": resources, "limits": resources},
    }
    render_spec = _train_job_spec if pods.kind == TRAIN_JOB else _pytorch_job_spec
    return {
        "apiVersion": pods.kind.api,
        "kind": pods.kind.name,
        "metadata": {**_metadata(pods), "annotations": {STACK: stack.name}},
        "spec": render_spec(container, placement.nproc_per_node, size, pods),
    }


def _command(plan: JobPlan, stack: Stack) -> Manifest:
    args = ["-m", plan.module, *plan.argv]
    if plan.backend != "ccl":
        return {"command": ["torchrun"], "args": args}
    script = "\n".join([*ccl_setup(stack), 'exec torchrun "$@"'])
    return {"command": ["bash", "-c", script, "torchrun"], "args": args}


def _environment(name: str, plan: JobPlan, placement: Placement, stack: Stack) -> dict[str, str]:
    env = {**rank_environment(plan, placement, CODE, stack), MARK: mark_of(name)}
    env |= _CCL_WITHOUT_MPIRUN if plan.backend == "ccl" else {}
    return {
        **env,
        "HF_HOME": f"{CLAIM_PATH}/huggingface",
        # torchrun's own limit is 30 s. Old ones, such as those of 1.13 and 2.7, know no other.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(CHECKPOINT_SECONDS),
    }


def _token(pods: PodOptions) -> list[Manifest]:
    if not pods.hub_secret:
        return []
    source = {"secretKeyRef": {"name": pods.hub_secret, "key": HUB_TOKEN}}
    return [{"name": HUB_TOKEN, "valueFrom": source}]


def _train_job_spec(container: Manifest, nproc: int, size: PodSize, pods: PodOptions) -> Manifest:
    pod = _pod_spec(pods, size, {"name": "node"})
    patch = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
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
    replica = {"restartPolicy": "OnFailure", "template": {"spec": pod}}
    roles = {"Master": 1, "Worker": pods.nodes - 1}
    return {
        "nprocPerNode": str(nproc),
        "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": RETRIES},
        "pytorchReplicaSpecs": {
            role: {"replicas": count, **replica} for role, count in roles.items() if count
        },
    }


def _pod_spec(pods: PodOptions, size: PodSize, container: Mapping[str, Any]) -> Manifest:
    mounts = [
        {"name": "workspace", "mountPath": CLAIM_PATH},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    spec: Manifest = {
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "securityContext": POD_SECURITY,
        "containers": [
            {**container, "securityContext": CONTAINER_SECURITY, "volumeMounts": mounts}
        ],
        "volumes": [
            {"name": "workspace", "persistentVolumeClaim": {"claimName": pods.claim.name}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{size.shm_gib}Gi"}},
        ],
    }
    if pods.kind != TRAIN_JOB:
        # A patch of Trainer's runtime can't have it.
        spec["automountServiceAccountToken"] = False
    if not pods.any_cpu:
        spec["nodeSelector"] = {AMX_LABEL: "true"}
    if pods.pull_secret:
        spec["imagePullSecrets"] = [{"name": pods.pull_secret}]
    return spec


def _metadata(pods: PodOptions) -> Manifest:
    metadata: Manifest = {"name": pods.name, "labels": {LABEL: MANAGER}}
    return metadata | ({"namespace": pods.namespace} if pods.namespace else {})
