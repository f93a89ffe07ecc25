"""``spr-cluster k8s status``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime, timezone

from cluster.cli.display import format_seconds, format_table
from cluster.cli.parser import SubParsers, add_command
from jobs.cli.k8s.common import access_flags, add_job_options, open_api
from jobs.launchers.kubernetes.jobs import explain, list_jobs, require_job
from jobs.launchers.kubernetes.problems import KubernetesProblem, exit_code
from jobs.launchers.kubernetes.resources import JobView

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
    add_job_options(parser, nargs="?")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    api, now = open_api(args), datetime.now(timezone.utc)
    if args.job:
        job = require_job(api, args.job)
        problems = explain(api, job)
        shown = [{"text": each.text, "fix": each.fix} for each in problems]
        result = {**_describe(job), "problems": shown}
        text = _render_one(job, problems, now)
    else:
        jobs = list_jobs(api)
        result = {"namespace": api.namespace, "jobs": [_describe(each) for each in jobs]}
        text = (
            _render(jobs, now)
            if jobs
            else (
                f"No jobs in namespace {api.namespace} of context {api.context}. "
                f"`spr-cluster k8s submit squad --nodes N{access_flags(args)}` starts one."
            )
        )
    print(json.dumps(result) if args.json else text)
    return 0


def _describe(job: JobView) -> dict[str, object]:
    return {
        "job": job.name,
        "kind": job.kind.name,
        "state": job.state,
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
            for pod in job.pods
        ],
    }


def _render(jobs: Sequence[JobView], now: datetime) -> str:
    rows = [("JOB", "KIND", "STATE", "NODES", "AGE")]
    for job in jobs:
        age = (now - job.created).total_seconds() if job.created else None
        shown = "-" if age is None else format_seconds(max(0.0, age))
        rows.append((job.name, job.kind.name, job.state, str(job.nodes), shown))
    return format_table(rows)


def _render_one(job: JobView, problems: Sequence[KubernetesProblem], now: datetime) -> str:
    lines = [
        _render([job], now),
        f"image {job.image}, claim {job.claim or '-'}",
        *(f"{each.type}: {why}" for each in job.conditions if (why := each.message or each.reason)),
    ]
    pods = [(pod.name, pod.phase, pod.node or "-", str(pod.restarts)) for pod in job.pods]
    if pods:
        lines += ["", format_table([("POD", "PHASE", "NODE", "RESTARTS"), *pods])]
    return "\n".join([*lines, *([""] if problems else []), *map(str, problems)])
