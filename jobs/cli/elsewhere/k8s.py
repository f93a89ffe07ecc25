"""``spr-cluster k8s``: one subcommand for each action."""

from __future__ import annotations

import argparse
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.console.display import PlainProgress, TreeProgress, make_progress
from cluster.console.output import emit, say
from cluster.console.parser import SubParsers, add_command, add_json_option
from infra.errors import UsageError
from infra.words import counted
from jobs.cli.attach import follow
from jobs.cli.elsewhere.pod_options import add_pod_options, build_rendered
from jobs.cli.shared.chosen_job import (
    KubernetesAccess,
    access_flags,
    add_access_options,
    open_api,
    remember_job,
)
from jobs.cli.shared.job_display import render_end
from jobs.cli.shared.job_options import add_tasks
from jobs.launchers.kubernetes.errors import ConflictError
from jobs.launchers.kubernetes.jobs import refuse, require_kinds
from jobs.launchers.kubernetes.launcher import KubernetesLauncher
from jobs.launchers.kubernetes.manifests import Manifest, Rendered
from jobs.launchers.kubernetes.preflight import Preflight, find_missing_rights
from jobs.launchers.kubernetes.request import CLAIM_PATH, JOB_KINDS, JobKind
from jobs.launchers.kubernetes.resources import core_path
from jobs.launchers.launcher import QUEUED

if TYPE_CHECKING:
    from jobs.launchers.kubernetes.api import KubernetesApi

_EXAMPLES = """\
  spr-cluster render k8s squad --nodes 4 --image me/spr:1 --output build
  spr-cluster k8s submit squad --nodes 4 --image ghcr.io/me/spr:1
  spr-cluster jobs --namespace ml
"""
_SUBMIT_EXAMPLES = """\
  spr-cluster k8s submit squad --nodes 4 --image ghcr.io/me/spr:1
  spr-cluster k8s submit squad --nodes 2 --image me/spr:1 --cores 8 --any-cpu
  spr-cluster k8s submit squad --nodes 4 --image ghcr.io/me/spr:1 --dry-run
  spr-cluster k8s submit squad --nodes 4 --image ghcr.io/me/spr:1 --detach
"""
_ABOUT_SUBMIT = (
    "Submit the job that `render k8s {task}` prints. Its image must be in a registry. The cluster is "
    "checked first: if there are problems, all are listed and nothing is created. Ctrl-C leaves the "
    "job running."
)


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "k8s",
        "Train on Kubernetes with Kubeflow: the same jobs, stacks, and placement as on a cluster of "
        "your own. `jobs`, `attach`, `logs`, `wait`, `cancel`, `fetch`, and `report` accept its ID like "
        "any other job's.",
        _EXAMPLES,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    submit = add_command(
        actions,
        "submit",
        "Check whether a cluster can take a job, create its claim and the job, and follow it.",
        _SUBMIT_EXAMPLES,
        "run a job on a cluster",
    )
    for task, each in add_tasks(submit, _ABOUT_SUBMIT, _SUBMIT_EXAMPLES, run):
        add_pod_options(each, task)
        add_access_options(each, namespace=False)
        text = "let the cluster validate the objects; create nothing"
        each.add_argument("--dry-run", action="store_true", help=text)
        text = "return without following the job; `attach` follows it later"
        each.add_argument("--detach", action="store_true", help=text)
        add_json_option(each)


def run(args: argparse.Namespace) -> int:
    now = datetime.now(timezone.utc)
    build_rendered(args, now)  # Refuse invalid options before contacting the cluster.
    api, progress = open_api(args), make_progress()
    with progress.phase(f"Check context {api.context}, namespace {api.namespace}"):
        kind = _choose_kind(api, args)
        args.kind = kind.name
        if args.name and api.peek(kind.path(api.namespace, args.name)):
            raise _exists(args.name, args)
        rendered = build_rendered(args, now)
        problems = Preflight(api, kind, rendered.pods, rendered.size, rendered.claim).run()
    warnings = [*rendered.placement.warnings, *(each for each in problems if each.is_warning)]
    for warning in warnings:
        say(f"warning: {warning}")
    refuse([each for each in problems if not each.is_warning])
    with progress.phase("Try the objects" if args.dry_run else "Create the objects"):
        is_new = _create(api, kind, rendered, args)
    if not args.dry_run:
        _remember(rendered, api, args)
    if args.dry_run or args.detach:
        _say_done(rendered, is_new, args)
    else:
        _follow(KubernetesLauncher(api, access_flags(args).strip()), rendered, args, progress)
    return 0


def _remember(rendered: Rendered, api: KubernetesApi, args: argparse.Namespace) -> None:
    pods = rendered.pods
    access = KubernetesAccess(
        context=api.context,
        kubeconfig=args.kubeconfig and str(Path(args.kubeconfig).absolute()),
        namespace=api.namespace,
        claim=pods.claim.name,
        image=pods.image,
        pull_secret=pods.pull_secret,
    )
    remember_job(pods.name, access)


def _follow(
    launcher: KubernetesLauncher,
    rendered: Rendered,
    args: argparse.Namespace,
    progress: PlainProgress | TreeProgress,
) -> None:
    name = rendered.pods.name
    end, result = follow(launcher, name, progress)

    def render() -> str:
        text = render_end(name, end, result, Path(CLAIM_PATH, "jobs", name, "output"))
        return text + f"\nto fetch them: spr-cluster fetch {name} {launcher.flags}".rstrip()

    emit(args, render, {**result, "job": name, "state": end.state})


def _choose_kind(api: KubernetesApi, args: argparse.Namespace) -> JobKind:
    """Return the kind to submit. Raises :class:`UsageError` if the cluster doesn't have it."""
    kinds = require_kinds(api)
    if not args.kind:
        able = (each for each in kinds if not [*find_missing_rights(api, [each.create_right])])
        return next(able, kinds[0])
    chosen = JOB_KINDS[args.kind]
    if chosen not in kinds:
        raise UsageError(
            f"context {api.context}: the cluster has no {args.kind}",
            hint=f"it has {kinds[0].name}: omit --kind; or install {chosen.install}",
        )
    return chosen


def _create(
    api: KubernetesApi, kind: JobKind, rendered: Rendered, args: argparse.Namespace
) -> bool:
    """Create the claim, unless it exists, and the job. Returns whether the claim is new."""

    def is_made(path: str, manifest: Manifest, *, dry_run: bool = args.dry_run) -> bool:
        with suppress(ConflictError):
            api.create(path, manifest, dry_run=dry_run)
            return True
        return False

    claims, is_new = core_path(api.namespace, "persistentvolumeclaims"), False
    jobs, exists = kind.path(api.namespace), _exists(rendered.pods.name, args)
    # A cluster reports an exhausted quota before it reports that the claim exists.
    if rendered.claim and not api.peek(f"{claims}/{rendered.pods.claim.name}"):
        # A rejected job must leave no claim behind.
        if not is_made(jobs, rendered.job, dry_run=True):
            raise exists
        is_new = is_made(claims, rendered.claim)
    if not is_made(jobs, rendered.job):
        raise exists
    return is_new


def _exists(name: str, args: argparse.Namespace) -> UsageError:
    flags = access_flags(args)
    return UsageError(
        f"job {name} exists already",
        hint=f"give another --name; `spr-cluster jobs {name}{flags}` shows it, "
        f"`spr-cluster cancel {name}{flags}` removes it",
    )


def _say_done(rendered: Rendered, is_new: bool, args: argparse.Namespace) -> None:
    name, claim, flags = rendered.pods.name, rendered.pods.claim.name, access_flags(args)
    result: dict[str, object] = {"job": name, "kind": args.kind}
    if args.dry_run:
        result |= {"created": False}
        kinds = " and ".join(each["kind"] for each in rendered.manifests)
        text = f"The cluster accepts {kinds} of job {name}; nothing was created."
    else:
        result |= {"claim": claim, "state": QUEUED}
        used = f"{'new' if is_new else 'existing'} claim {claim}"
        text = (
            f"{args.kind} {name}, {counted(rendered.pods.nodes, 'pod')}, {used}\n"
            f"  to see it:    spr-cluster jobs {name}{flags}\n"
            f"  to follow it: spr-cluster attach {name}{flags}\n"
            f"  its results:  spr-cluster fetch {name}{flags}\n"
            f"  to end it:    spr-cluster cancel {name}{flags}"
        )
    emit(args, text, result)
