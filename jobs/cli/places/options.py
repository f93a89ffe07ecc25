"""``--to``, ``--dry-run``, and the options that only some places of a job understand."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from cluster.console.parser import Parser, positive_int
from infra.errors import UsageError
from jobs.launchers.kubernetes.request import JOB_KINDS
from jobs.launchers.placement import NodeShape
from jobs.worker.training.options import flag

CLUSTER, SLURM, KUBERNETES = "cluster", "slurm-script", "kubernetes-yaml"
PLACES = (CLUSTER, SLURM, KUBERNETES)
_ELSEWHERE = ("write_to", "job_name", "cores", "numa")
_PODS = (
    *("kind", "image", "namespace", "claim", "node_selector", "memory_gib", "threads_per_core"),
    *("apply", "yes"),
)
_ON_CLUSTER = (
    *("name", "cloud", "region", "instance_type", "placement", "no_tuned", "detach", "verbose"),
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
HIDDEN = ("instance_type", "stack", *_ELSEWHERE, *_PODS)
"""What only the advanced help shows."""
_FLAGS = {"write_to": "--output", "memory_gib": "--memory"}
# The value's own label, or that of node-feature-discovery for AMX.
_NODE_LABEL = r"([a-z0-9.-]{1,253}/)?\w([\w.-]{0,61}\w)?=(\w([\w.-]{0,61}\w)?)?"
ANY = "any"


def add_dry_run_options(parser: Parser, others: str = "") -> None:
    """Add ``--to`` and ``--dry-run``; ``others`` describes places besides the cluster."""
    add = parser.add_argument_group("place").add_argument
    text = f"where the job runs{others} (default: cluster)"
    add("--to", choices=PLACES, default=CLUSTER, help=text)
    text = "print the placement and the mpirun command; buy, send, and change nothing"
    add("--dry-run", action="store_true", help=text)
    text = "for --dry-run without a cluster: the nodes' EC2 type"
    add("--instance-type", metavar="TYPE", help=text)
    text = "software of --dry-run without a cluster, and of other places; see `stacks`"
    add("--stack", metavar="NAME", help=text)


def add_place_options(parser: Parser) -> None:
    """Add the options of :func:`add_dry_run_options`, and those of the other places."""
    add_dry_run_options(parser, "; the others write it for a cluster that this tool has not made")
    add = parser.add_argument_group(f"{SLURM}, {KUBERNETES}").add_argument
    text = "write the files here: YAML and the image's build folder, or the job's folder for Slurm"
    add("--output", dest="write_to", metavar="DIR", help=text)
    add("--job-name", metavar="NAME", help="the job's name (default: TASK-DATE-TIME-…)")
    text = f"physical cores of a node (default on Kubernetes: {NodeShape().cores})"
    add("--cores", type=positive_int, metavar="N", help=text)
    add("--numa", type=positive_int, metavar="N", help="NUMA nodes of a node (default: 1)")
    _add_pods(parser.add_argument_group(KUBERNETES))


def _add_pods(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    kinds = tuple(JOB_KINDS)
    add("--kind", choices=kinds, help=f"kind of job of Kubeflow (default: {kinds[0]})")
    add("--image", help="the image's name in a registry (default: spr-cluster:STACK)")
    add("--namespace", metavar="NAME", help="Kubernetes namespace (default: that of the context)")
    text = "use this PersistentVolumeClaim instead of a new one, spr-cluster"
    add("--claim", metavar="NAME", help=text)
    text = (
        f"only run on nodes with this label, besides that for AMX; {ANY}: without AMX; repeatable"
    )
    add("--node-selector", action="append", type=_label, metavar="KEY=VALUE", help=text)
    text = f"memory of a node, in GiB (default: {NodeShape().memory_gib})"
    add("--memory", dest="memory_gib", type=positive_int, metavar="N", help=text)
    text = f"hardware threads per core (default: {NodeShape().threads_per_core})"
    add("--threads-per-core", type=positive_int, metavar="N", help=text)
    text = "create the job with kubectl; with --dry-run, the cluster only validates it"
    add("--apply", action="store_true", help=text)
    add("--yes", "-y", action="store_true", help="create it without asking")


def _label(text: str) -> str:
    if text != ANY and not re.fullmatch(_NODE_LABEL, text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a node's label, KEY=VALUE")
    return text


def check_place(options: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` for an option that another place than that of ``--to`` understands."""
    place = options["to"]
    for name, places in _PLACES_OF.items():
        value = options.get(name)
        if value and value not in _DEFAULTS and place not in places:
            option, able = _FLAGS.get(name, flag(name)), " or ".join(places)
            raise UsageError(f"{option}: not with --to {place}, only with --to {able}")
    if options.get("apply") and options["write_to"]:
        raise UsageError("--apply creates the job, --output writes it: give one of them")
    if options.get("yes") and not options["apply"]:
        raise UsageError("--yes confirms --apply: give both, or neither")
    if place == CLUSTER and options["stack"] and not options["instance_type"]:
        raise UsageError("--stack: the cluster has its own; only with --dry-run --instance-type")
    if options["instance_type"] and not options["dry_run"]:
        raise UsageError(
            "--instance-type is for --dry-run: `up --instance-type` chooses a cluster's"
        )


def read_shape(options: Mapping[str, Any]) -> NodeShape:
    """Return the node that the options describe. Raises :class:`UsageError` for one out of range."""
    names = (each.name for each in fields(NodeShape))
    return NodeShape(**{name: options[name] for name in names if options[name] is not None})
