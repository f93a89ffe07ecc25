"""Options of a job on Kubernetes, and the resulting job, for ``k8s submit`` and ``render k8s``."""

from __future__ import annotations

from jobs.worker.spec import PlacementOptions

import argparse
import re
from datetime import datetime

from cluster.console.parser import Parser, positive_int
from infra.errors import UsageError
from jobs.cli.shared.chosen_job import NAMESPACE_HELP, OBJECT_NAME
from jobs.cli.shared.job_options import (
    add_shape_options,
    add_training_options,
    read_options,
    read_shape,
    refuse_own_settings,
)
from jobs.launchers.kubernetes.manifests import AMX_LABEL, HUB_TOKEN, Rendered, render
from jobs.launchers.kubernetes.request import CLAIM_PATH, JOB_KINDS, TRAIN_JOB, Claim, PodOptions
from jobs.launchers.launcher import check_forms
from jobs.launchers.plan import new_job_id
from jobs.reference.plan import PRESETS
from jobs.train.elsewhere import plan_in_pods, plan_reference_in_pods
from provision.stacks.load import DEFAULT_STACK, load_stack

# Names of pods and services add a suffix, with at most 63 characters in total.
_NAME = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"
# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/
_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NODE_LABEL = r"([a-z0-9.-]{1,253}/)?\w([\w.-]{0,61}\w)?=(\w([\w.-]{0,61}\w)?)?"
_SIZE = r"[1-9][0-9]{0,8}(Mi|Gi|Ti|M|G|T)"
# https://github.com/distribution/reference
_IMAGE = r"[a-zA-Z0-9][a-zA-Z0-9._:/@-]{0,499}"
_FORMS = {
    "name": (_NAME, "lower-case letters, digits, and dashes, at most 40, first a letter"),
    "namespace": (_LABEL, "lower-case letters, digits, and dashes, at most 63"),
    "image": (_IMAGE, "REPOSITORY/NAME:TAG"),
    "claim": (OBJECT_NAME, "a claim's name"),
    "storage_class": (OBJECT_NAME, "a storage class's name"),
    "pull_secret": (OBJECT_NAME, "a secret's name"),
    "hub_secret": (OBJECT_NAME, "a secret's name"),
    "claim_size": (_SIZE, "a size such as 100Gi"),
}
_CLAIM_SIZE = "100Gi"
_SHAPE = {
    "cores": "physical cores per node",
    "memory_gib": "memory per node, in GiB",
    "numa": "NUMA nodes per node",
    "threads_per_core": "hardware threads per core",
}


def add_pod_options(parser: Parser, task: str) -> None:
    """Add the options that determine a job's image, claim, and manifest."""
    _add_job(parser.add_argument_group("job"))
    if task == "squad":
        _add_recipe(parser.add_argument_group("recipe"))
    parser.set_defaults(recipe="fast", preset=None, run_qa=None)
    _add_claim(parser.add_argument_group("claim"))
    _add_nodes(parser.add_argument_group("nodes"))
    add_training_options(parser, task, "run_qa", "ccl_workers", "threads_per_core")


def _add_job(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--nodes", type=positive_int, required=True, metavar="N", help="number of pods")
    text = (
        "default: TrainJob (Kubeflow Trainer 2); for `submit`, a kind that the cluster has and you may "
        "create, preferably TrainJob"
    )
    add("--kind", choices=tuple(JOB_KINDS), help=text)
    add("--stack", help="software, see `stacks` (default: upstream; recipe reference: reference)")
    add("--image", help="the image's name in a registry (default: spr-cluster:STACK)")
    add("--name", help="the job's name (default: TASK-DATE-TIME-…)")
    add("--namespace", help=NAMESPACE_HELP)
    add("--pull-secret", metavar="NAME", help="secret with which nodes pull the image")
    text = f"secret with a Hugging Face token, under the key {HUB_TOKEN}"
    add("--hub-secret", metavar="NAME", help=text)


def _add_recipe(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    text = "fast: this tool's own; reference: the documentation's job, run_qa.py (default: fast)"
    add("--recipe", choices=("fast", "reference"), default="fast", help=text)
    text = "published model and settings (default with --recipe reference: bert-large)"
    add("--preset", choices=tuple(PRESETS), help=text)
    text = f"recipe reference: folder with run_qa.py on the claim, such as {CLAIM_PATH}/run_qa "
    add("--run-qa", metavar="DIR", help=f"{text}(default: the stack's, in the image)")


def _add_claim(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--claim", metavar="NAME", help="use this PersistentVolumeClaim instead of a new one")
    add("--claim-size", metavar="SIZE", help=f"size of the new claim (default: {_CLAIM_SIZE})")
    add("--storage-class", metavar="NAME", help="class of the new claim (default: the cluster's)")


def _add_nodes(group: argparse._ArgumentGroup) -> None:
    add_shape_options(group, _SHAPE)
    add = group.add_argument
    add("--ppn", type=positive_int, metavar="N", help="ranks per pod (default: one per NUMA node)")
    text = "cores per rank for oneCCL (default: 1)"
    add("--ccl-workers", type=positive_int, metavar="N", help=text)
    add("--any-cpu", action="store_true", help="also run on nodes without AMX")
    text = "only run on nodes with this label; repeatable"
    add("--node-selector", action="append", default=[], type=_label, metavar="KEY=VALUE", help=text)


def _label(text: str) -> list[str]:
    if not re.fullmatch(_NODE_LABEL, text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a node's label, KEY=VALUE")
    return text.split("=")


def build_rendered(args: argparse.Namespace, now: datetime) -> Rendered:
    """Return the job for the options. Raises :class:`UsageError` for options that don't fit together."""
    reference = args.recipe == "reference"
    stack = load_stack(args.stack or ("reference" if reference else DEFAULT_STACK))
    pods = _read_pods(args, stack.name, now)
    placement = PlacementOptions(nproc_per_node=args.ppn, ccl_workers=args.ccl_workers)
    if reference:
        refuse_own_settings(args, ("demo",))
        preset = PRESETS[args.preset or "bert-large"]
        plan = plan_reference_in_pods(preset, args.run_qa, placement, pods, stack)
    else:
        if args.run_qa:
            raise UsageError("--run-qa requires --recipe reference")
        plan = plan_in_pods(read_options(args, args.preset), placement, pods, stack)
    return render(plan, pods, stack)


def _read_pods(args: argparse.Namespace, stack: str, now: datetime) -> PodOptions:
    check_forms(args, _FORMS)
    if args.claim and (args.claim_size or args.storage_class):
        raise UsageError("--claim names one that exists: omit --claim-size and --storage-class")
    new = Claim(size=args.claim_size or _CLAIM_SIZE, storage_class=args.storage_class)
    return PodOptions(
        name=args.name or new_job_id(args.task, now),
        nodes=args.nodes,
        image=args.image or f"spr-cluster:{stack}",
        kind=JOB_KINDS[args.kind] if args.kind else TRAIN_JOB,
        namespace=args.namespace,
        claim=Claim(args.claim) if args.claim else new,
        shape=read_shape(args),
        pull_secret=args.pull_secret,
        hub_secret=args.hub_secret,
        node_labels={**({} if args.any_cpu else {AMX_LABEL: "true"}), **dict(args.node_selector)},
    )
