"""``--to``, ``--dry-run``, and the options that only some places of a job understand."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from cluster.cli.chosen_cluster import ClusterRequest
from cluster.console.options import YES, option, positive_int, switch
from infra.errors import UsageError
from jobs.launchers.kubernetes.request import JOB_KINDS
from jobs.launchers.placement import NodeShape
from jobs.worker.training.options import flag

CLUSTER, SLURM, KUBERNETES = "cluster", "slurm-script", "kubernetes-yaml"
ANY = "any"
PLACES = (CLUSTER, SLURM, KUBERNETES)
_ELSEWHERE = ("write_to", "job_name", "cores", "numa")
_PODS = (
    *("kind", "image", "namespace", "claim", "node_selector", "memory_gib", "threads_per_core"),
    *("apply", "yes"),
)
_ON_CLUSTER = (
    *("name", "cloud", "region", "instance_type", "placement", "no_tuned", "detach"),
    *("retries", "elastic", "max_time", "bucket", "until_done", "on_finish", "down_when_done"),
    *("env", "env_file", "hub_token", "results", "push_to", "resume", "smoke"),
)
_PLACES_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ON_CLUSTER, (CLUSTER,)),
    **dict.fromkeys(_ELSEWHERE, (SLURM, KUBERNETES)),
    **dict.fromkeys(_PODS, (KUBERNETES,)),
    **dict.fromkeys(("recipe", "run_qa", "ccl_workers"), (CLUSTER, KUBERNETES)),
}
_DEFAULTS = ("auto", "fast")
"""Of the options among them that have one."""
_FLAGS = {"write_to": "--output", "memory_gib": "--memory"}
# The value's own label, or that of node-feature-discovery for AMX.
_NODE_LABEL = r"([a-z0-9.-]{1,253}/)?\w([\w.-]{0,61}\w)?=(\w([\w.-]{0,61}\w)?)?"


def parse_label(text: str) -> str:
    """Parse ``KEY=VALUE`` or :data:`ANY`. Raises ``ValueError``."""
    if text != ANY and not re.fullmatch(_NODE_LABEL, text, re.ASCII):
        raise ValueError(f"{text!r}: expected a node's label, KEY=VALUE")
    return text


@dataclass(frozen=True, kw_only=True)
class DryRunRequest(ClusterRequest):
    """Where a job runs, and whether it is only planned."""

    to: str = option(
        "where the job runs; the others write it for a cluster that this tool has not made, and only "
        "`train` can (default: cluster)",
        CLUSTER,
        choices=PLACES,
        section="place",
    )
    dry_run: bool = switch(
        "print the placement and the mpirun command; buy, send, and change nothing", section="place"
    )
    instance_type: str | None = option(
        "for --dry-run without a cluster: the nodes' EC2 type",
        metavar="TYPE",
        section="place",
        for_experts=True,
    )
    stack: str | None = option(
        "software of --dry-run without a cluster, and of other places; see `stacks`",
        metavar="NAME",
        section="place",
        for_experts=True,
    )


_OTHERS: dict[str, Any] = {"section": f"{SLURM}, {KUBERNETES}", "for_experts": True}
_IN_PODS: dict[str, Any] = {"section": KUBERNETES, "for_experts": True}


@dataclass(frozen=True, kw_only=True)
class PlaceRequest(DryRunRequest):
    """The options of places besides a cluster of this tool."""

    write_to: str | None = option(
        "write the files here: YAML and the image's build folder, or the job's folder for Slurm",
        flags=("--output",),
        metavar="DIR",
        **_OTHERS,
    )
    job_name: str | None = option(
        "the job's name (default: TASK-DATE-TIME-…)", metavar="NAME", **_OTHERS
    )
    cores: int | None = option(
        f"physical cores of a node (default on Kubernetes: {NodeShape().cores})",
        parse=positive_int,
        metavar="N",
        **_OTHERS,
    )
    numa: int | None = option(
        "NUMA nodes of a node (default: 1)", parse=positive_int, metavar="N", **_OTHERS
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
    memory_gib: int | None = option(
        f"memory of a node, in GiB (default: {NodeShape().memory_gib})",
        flags=("--memory",),
        parse=positive_int,
        metavar="N",
        **_IN_PODS,
    )
    threads_per_core: int | None = option(
        f"hardware threads per core (default: {NodeShape().threads_per_core})",
        parse=positive_int,
        metavar="N",
        **_IN_PODS,
    )
    apply: bool = switch(
        "create the job with kubectl; with --dry-run, the cluster only validates it", **_IN_PODS
    )
    yes: bool = switch("create it without asking", flags=YES, **_IN_PODS)

    def read_shape(self) -> NodeShape:
        """Return the node that the options describe. Raises :class:`UsageError` for one out of range."""
        given = {each.name: getattr(self, each.name) for each in fields(NodeShape)}
        return NodeShape(**{name: value for name, value in given.items() if value is not None})


def check_place(request: DryRunRequest) -> None:
    """Raise :class:`UsageError` for an option that another place than that of ``--to`` understands."""
    place, options = request.to, vars(request)
    for name, places in _PLACES_OF.items():
        value = options.get(name)
        if value and value not in _DEFAULTS and place not in places:
            named, able = _FLAGS.get(name, flag(name)), " or ".join(places)
            raise UsageError(f"{named}: not with --to {place}, only with --to {able}")
    if isinstance(request, PlaceRequest):
        if request.apply and request.write_to:
            raise UsageError("--apply creates the job, --output writes it: give one of them")
        if request.yes and not request.apply:
            raise UsageError("--yes confirms --apply: give both, or neither")
    if place == CLUSTER and request.stack and not request.instance_type:
        raise UsageError("--stack: the cluster has its own; only with --dry-run --instance-type")
    if request.instance_type and not request.dry_run:
        raise UsageError(
            "--instance-type is for --dry-run: `up --instance-type` chooses a cluster's"
        )
