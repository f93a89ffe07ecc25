"""``spr-cluster k8s status``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime, timezone

from cluster.cli.display import format_seconds, format_table
from cluster.cli.parser import SubParsers, add_command
from jobs.cli.k8s.access import access_flags, add_access_options, add_name_argument, open_api
from jobs.kubernetes.jobs import Found, explain, list_found, require_job
from jobs.kubernetes.resources import PodView
from jobs.kubernetes.troubles import Trouble, exit_code

_EXAMPLES = """\
  spr-cluster k8s status
  spr-cluster k8s status squad-20261122-142501-k3f
"""


def add_parser(actions: SubParsers) -> None:
    parser = add_command(
        actions,
        "status",
        "List the training jobs of a namespace; or show one job, its pods, and why it does not run.",
        _EXAMPLES,
        help_="list jobs, or show one and why it does not run",
    )
    add_name_argument(parser, optional=True)
    add_access_options(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    api, now = open_api(args), datetime.now(timezone.utc)
    if args.job:
        found = require_job(api, args.job)
        troubles = explain(api, found)
        one = {**_describe(found), "troubles": [each._asdict() for each in troubles]}
        print(json.dumps(one) if args.json else _render_one(found, troubles, now))
        return 0
    jobs = list_found(api)
    if args.json:
        print(json.dumps({"namespace": api.namespace, "jobs": [_describe(each) for each in jobs]}))
    elif jobs:
        print(_render(jobs, now))
    else:
        print(
            f"No jobs in namespace {api.namespace} of context {api.context}. "
            f"`spr-cluster k8s submit squad --nodes N{access_flags(args)}` starts one."
        )
    return 0


def _describe(found: Found) -> dict[str, object]:
    job = found.job
    return {
        "job": job.name,
        "kind": job.kind.kind,
        "state": found.state,
        "nodes": job.nodes,
        "ranks_per_node": job.node_ranks,
        "created": job.created.isoformat() if job.created else None,
        "conditions": [each._asdict() for each in job.conditions],
        "claim": job.claim,
        "image": job.image,
        "pods": [
            {
                "name": pod.name,
                "phase": pod.phase,
                "node": pod.node or None,
                "restarts": pod.restarts,
                "exit_code": exit_code(pod),
            }
            for pod in found.pods
        ],
    }


def _render(jobs: Sequence[Found], now: datetime) -> str:
    rows = [("JOB", "KIND", "STATE", "NODES", "AGE")]
    for found in jobs:
        job = found.job
        rows.append((job.name, job.kind.kind, found.state, str(job.nodes), _age(found, now)))
    return format_table(rows)


def _render_one(found: Found, troubles: Sequence[Trouble], now: datetime) -> str:
    job = found.job
    lines = [
        _render([found], now),
        f"image {job.image}, claim {job.claim or '-'}",
        *(f"{each.type}: {each.message or each.reason}" for each in job.conditions),
    ]
    if found.pods:
        rows = [("POD", "PHASE", "NODE", "RESTARTS"), *map(_pod_row, found.pods)]
        lines += ["", format_table(rows)]
    if troubles:
        lines += ["", *map(str, troubles)]
    return "\n".join(lines)


def _pod_row(pod: PodView) -> tuple[str, str, str, str]:
    return pod.name, pod.phase, pod.node or "-", str(pod.restarts)


def _age(found: Found, now: datetime) -> str:
    created = found.job.created
    return format_seconds(max(0.0, (now - created).total_seconds())) if created else "-"
