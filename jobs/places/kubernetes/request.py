"""What a job on Kubernetes requests: its kind, options, and the size of its pods. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from infra.errors import UsageError
from infra.words import counted
from jobs.places.placement import NodeShape, Placement, Preload, place_on
from jobs.worker.runtime.output import state_folder
from jobs.worker.spec import PlacementOptions


@dataclass(frozen=True)
class JobKind:
    """A kind of job. ``api`` is its group and version; ``pod_label`` names the job on its pods."""

    name: str
    api: str
    pod_label: str


# Kubeflow Trainer 2.3 or newer: 2.2 refuses terminationGracePeriodSeconds.
TRAIN_JOB = JobKind("TrainJob", "trainer.kubeflow.org/v1alpha1", "jobset.sigs.k8s.io/jobset-name")
# Kubeflow training-operator 1.x.
PYTORCH_JOB = JobKind("PyTorchJob", "kubeflow.org/v1", "training.kubeflow.org/job-name")
JOB_KINDS = {kind.name: kind for kind in (TRAIN_JOB, PYTORCH_JOB)}
"""All kinds, the preferred one first."""


CLAIM_PATH = "/workspace"
"""Where every pod mounts the claim."""


@dataclass(frozen=True)
class PodOptions:
    """A job's requests besides its training. ``nodes`` is the number of pods."""

    name: str
    nodes: int
    image: str
    kind: JobKind = TRAIN_JOB
    namespace: str | None = None
    claim: str | None = None
    """An existing volume for data, models, and results; a new one without it."""
    shape: NodeShape = field(default_factory=NodeShape)
    node_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that a node must have."""

    @property
    def claim_name(self) -> str:
        return self.claim or "spr-cluster"

    @property
    def folder(self) -> str:
        """The job's folder on the claim."""
        return f"{CLAIM_PATH}/jobs/{self.name}"

    @property
    def output(self) -> str:
        """The ranks' output: model and results. Their logs, metrics, and checkpoints are in :attr:`state`."""
        return f"{self.folder}/output"

    @property
    def state(self) -> str:
        return str(state_folder(Path(self.output)))


_MEMORY_SHARE = 0.9
# A machine sold with 512 GiB shows its kernel about 2 % less.
_KERNEL_SHARE = 0.98
# GKE reserves shares of the first GiB, of the next, and so on:
# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes
_RESERVED = ((4, 0.25), (4, 0.2), (8, 0.1), (112, 0.06), (float("inf"), 0.02))
# For eviction, and for the pods of every node.
_OTHERS_GIB = 1.0
# oneCCL and Intel MPI exchange messages through it. It counts as the pod's memory.
_SHM_SHARE = 1 / 8


@dataclass(frozen=True)
class PodSize:
    """What a pod requests, which is also its limit: CPUs as Kubernetes counts them, and GiB."""

    cpus: int
    memory_gib: int
    shm_gib: int


def place_pod(
    shape: NodeShape, options: PlacementOptions, backend: str, preload: Preload
) -> tuple[Placement, PodSize]:
    """Return the placement of a pod's ranks, and the pod's size.

    Raises :class:`UsageError` for a shape or options that don't fit each other.
    """
    usable = _usable_cores(shape, options.nproc_per_node or shape.numa)
    placement = place_on(shape, usable, options, backend, preload)
    cores = placement.nproc_per_node * (placement.omp_threads + placement.ccl_workers)
    memory = _pod_memory(shape.memory_gib)
    # Both hardware threads of a core: otherwise another pod would use the second.
    size = PodSize(cores * shape.threads_per_core, memory, max(1, int(memory * _SHM_SHARE)))
    return placement, size


def _pod_memory(gib: float) -> int:
    """Return the GiB of a node that a pod may request."""
    left, reserved = gib, _OTHERS_GIB
    for size, share in _RESERVED:
        reserved += share * min(left, size)
        left -= min(left, size)
    return max(1, int(min(gib * _MEMORY_SHARE, gib * _KERNEL_SHARE - reserved)))


def _usable_cores(shape: NodeShape, ranks: int) -> int:
    """Return a NUMA node's cores for the pod, a multiple of the ranks; the node keeps the rest.

    It keeps at least one core of each NUMA node, so that these stay equal: kubelet, the container
    runtime, and the pods of every node need CPUs, and the static CPU manager requires a reservation.
    """
    each = shape.cores // shape.numa
    parts = 1 if shape.numa % ranks == 0 else ranks // shape.numa
    if shape.numa % ranks and ranks % shape.numa:
        raise UsageError(
            f"--ppn {ranks}: {counted(shape.numa, 'NUMA node')} can't be divided evenly among "
            f"{counted(ranks, 'rank')}",
            hint=f"use a divisor or a multiple of {shape.numa}",
        )
    usable = (each - 1) // parts * parts
    if not usable:
        raise UsageError(
            f"nodes with {counted(shape.cores, 'core')} in {counted(shape.numa, 'NUMA node')} have too few "
            f"for {counted(ranks, 'rank')} each: one core of each NUMA node is for the node itself",
            hint="use fewer ranks, or describe the nodes with --instance-type or --shape",
        )
    return usable
