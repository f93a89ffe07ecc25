"""``--to``, ``--dry-run``, and the options that only some places of a job understand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cluster.cli.chosen_cluster import ClusterRequest
from cluster.console.options import CLUSTER, EVERYWHERE, YES, option, options_of, switch
from infra.errors import UsageError
from infra.instance_types import (
    DEFAULT_INSTANCE_TYPE,
    INSTANCE_TYPES,
    InstanceType,
    complete_type_name,
    nearest_type,
)
from jobs.places.kubernetes.request import JOB_KINDS
from jobs.places.placement import NodeShape, parse_shape

SLURM, KUBERNETES = "slurm-script", "kubernetes-yaml"
ANY = "any"
PLACES = (CLUSTER, SLURM, KUBERNETES)
# The value's own label, or that of node-feature-discovery for AMX.
_NODE_LABEL = r"([a-z0-9.-]{1,253}/)?\w([\w.-]{0,61}\w)?=(\w([\w.-]{0,61}\w)?)?"


def parse_label(text: str) -> str:
    """Parse ``KEY=VALUE`` or :data:`ANY`. Raises ``ValueError``."""
    if text != ANY and not re.fullmatch(_NODE_LABEL, text, re.ASCII):
        raise ValueError(f"{text!r}: expected a node's label, KEY=VALUE")
    return text


def find_type(name: str) -> InstanceType:
    """Return an EC2 type in the table. Raises :class:`UsageError` for another one."""
    machine = INSTANCE_TYPES.get(complete_type_name(name))
    if machine is None:
        raise UsageError(
            f"--instance-type {name}: not in the table{nearest_type(name, INSTANCE_TYPES)}",
            hint=f"give one such as {DEFAULT_INSTANCE_TYPE}, or describe the nodes of other places with "
            "--shape",
        )
    return machine


def shape_of(machine: InstanceType) -> NodeShape:
    """Return the shape of an EC2 type's nodes."""
    return NodeShape(
        cores=machine.cores,
        memory_gib=max(2, round(machine.memory_gib)),
        numa=machine.sockets or 1,
        threads_per_core=max(1, machine.vcpus // machine.cores),
    )


_PLACE: dict[str, Any] = {"section": "place", "places": EVERYWHERE}


@dataclass(frozen=True, kw_only=True)
class DryRunRequest(ClusterRequest):
    """Where a job runs, and whether it is only planned."""

    to: str = option(
        "where the job runs; the others write it for a cluster that this tool has not made, and only "
        "`train` can (default: cluster)",
        CLUSTER,
        choices=PLACES,
        **_PLACE,
    )
    dry_run: bool = switch(
        "print the placement and the mpirun command; buy, send, and change nothing", **_PLACE
    )
    instance_type: str | None = option(
        "the nodes' EC2 type, for other places, and for --dry-run without a cluster",
        metavar="TYPE",
        excludes="shape",
        for_experts=True,
        **_PLACE,
    )
    stack: str | None = option(
        "software of --dry-run without a cluster, and of other places; see `stacks`",
        metavar="NAME",
        for_experts=True,
        **_PLACE,
    )


_OTHERS: dict[str, Any] = {
    "section": f"{SLURM}, {KUBERNETES}",
    "for_experts": True,
    "places": (SLURM, KUBERNETES),
}
_IN_PODS: dict[str, Any] = {"section": KUBERNETES, "for_experts": True, "places": (KUBERNETES,)}


@dataclass(frozen=True, kw_only=True)
class PlaceRequest(DryRunRequest):
    """The options of places besides a cluster of this tool."""

    write_to: str | None = option(
        "write the files here: YAML and the image's build folder, or the job's folder for Slurm",
        flags=("--output",),
        metavar="DIR",
        excludes="files",
        **_OTHERS,
    )
    job_name: str | None = option(
        "the job's name (default: TASK-DATE-TIME-…)", metavar="NAME", **_OTHERS
    )
    shape: str | None = option(
        "a node of another type: its physical cores and, optionally, NUMA nodes; on Kubernetes, also "
        "hardware threads per core and GiB of memory, such as cores=64,numa=2,threads=2,memory=1024 (default "
        f"on Kubernetes: {NodeShape()})",
        metavar="cores=N,…",
        excludes="shape",
        **_OTHERS,
    )
    kind: str | None = option(
        f"kind of job of Kubeflow (default: {next(iter(JOB_KINDS))})",
        choices=tuple(JOB_KINDS),
        **_IN_PODS,
    )
    image: str | None = option(
        "the image's name in a registry (default: spr-cluster:STACK)", **_IN_PODS
    )
    namespace: str | None = option(
        "Kubernetes namespace (default: that of the context)", metavar="NAME", **_IN_PODS
    )
    claim: str | None = option(
        "use this PersistentVolumeClaim instead of a new one, spr-cluster",
        metavar="NAME",
        **_IN_PODS,
    )
    node_selector: tuple[str, ...] = option(
        f"only run on nodes with this label, besides that for AMX; {ANY}: without AMX; repeatable",
        (),
        repeats=True,
        parse=parse_label,
        metavar="KEY=VALUE",
        **_IN_PODS,
    )
    apply: bool = switch(
        "create the job with kubectl; with --dry-run, the cluster only validates it",
        excludes="files",
        **_IN_PODS,
    )
    yes: bool = switch("create it without asking", flags=YES, needs="--apply", **_IN_PODS)

    def find_shape(self) -> NodeShape | None:
        """Return the nodes' shape, if it is given. Raises :class:`UsageError` for an invalid one."""
        if self.instance_type:
            return shape_of(find_type(self.instance_type))
        return parse_shape(self.shape) if self.shape else None


def check_place(request: DryRunRequest) -> None:
    """Raise :class:`UsageError` for an option that another place than that of ``--to`` understands."""
    place = request.to
    for each in options_of(type(request)):
        if each.places and place not in each.places and request.has_set(each.name):
            able = " or ".join(each.places)
            raise UsageError(f"{each.label}: not with --to {place}, only with --to {able}")
    if place == CLUSTER and request.stack and not request.instance_type:
        raise UsageError("--stack: the cluster has its own; only with --dry-run --instance-type")
    if place == CLUSTER and request.instance_type and not request.dry_run:
        raise UsageError(
            "--instance-type is for --dry-run: `up --instance-type` chooses a cluster's"
        )
