"""``spr-cluster k8s fetch``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from infra.errors import UsageError
from jobs.cli.k8s.common import add_job_options, object_name, open_api
from jobs.launchers.kubernetes.errors import KubernetesError
from jobs.launchers.kubernetes.jobs import find_job
from jobs.launchers.kubernetes.pod_log import read_log
from jobs.launchers.kubernetes.record import describe_record
from jobs.launchers.kubernetes.resources import JobView, PodView
from jobs.launchers.kubernetes.results_reader import ResultsReader
from jobs.launchers.record import claim_results, write_record_text
from jobs.train.request import check_results, expand_home

if TYPE_CHECKING:
    from jobs.launchers.kubernetes.api import KubernetesApi

_EXAMPLES = """\
  spr-cluster k8s fetch squad-20261122-142501-k3f
  spr-cluster k8s fetch squad-20261122-142501-k3f --results ./best
  spr-cluster k8s fetch squad-20261122-142501-k3f --claim spr-cluster --image ghcr.io/me/spr:1
"""


def add_parser(actions: SubParsers) -> None:
    parser = add_command(
        actions,
        "fetch",
        "Download the model, log, and results of a job from its claim, without checkpoints, through a "
        "small pod with the job's image, which is deleted at the end. `spr-cluster report` reads the folder. "
        "For a job that was deleted, name its claim and image, and the pull secret if it had one.",
        _EXAMPLES,
        help_="download a job's model, log, and results",
    )
    add_job_options(parser)
    add = parser.add_argument
    add("--results", metavar="DIR", help="local folder for the files (default: results/NAME)")
    add("--claim", type=object_name, metavar="NAME", help="of a job that was deleted")
    add("--image", help="of a job that was deleted")
    text = "secret with which nodes pull the image (default: the job's)"
    add("--pull-secret", type=object_name, metavar="NAME", help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    results = expand_home(args.results) if args.results else Path("results", args.job)
    check_results(results, args.job)
    api, progress = open_api(args), make_progress()
    with progress.phase(f"Fetch {args.job}"):
        job = find_job(api, args.job)
        spec = job.spec if job else {}
        if args.pull_secret:
            spec = {**spec, "imagePullSecrets": [{"name": args.pull_secret}]}
        claim, image = _find_files(job, args)
        reader = ResultsReader(api, args.job, claim, image, spec, progress.note, _warn)
        holder = reader.find_holder()
        if job and not job.is_over:
            progress.note(f"{args.job} is {job.state}; fetching its output so far")
        claim_results(results, args.job)
        reader.fetch(holder, results)
        if job:
            record = describe_record(job, api.context, api.namespace)
            write_record_text(results, json.dumps(record, indent=1) + "\n")
            if pod := job.pod(0):
                _fetch_log(api, pod, results / "log", progress.note)
    state = job.state if job else "deleted"
    if args.json:
        print(json.dumps({"job": args.job, "state": state, "results": str(results)}))
    else:
        print(f"{args.job} ({state}): {results}/\n  spr-cluster report {results}")
    return 0


def _find_files(job: JobView | None, args: argparse.Namespace) -> tuple[str, str]:
    """Return the claim and an image. Raises :class:`UsageError` if nothing says so."""
    if job and job.claim:
        return args.claim or job.claim, args.image or job.image
    if args.claim and args.image:
        return args.claim, args.image
    what = "has no claim of ours" if job else "doesn't exist"
    raise UsageError(
        f"job {args.job} {what}",
        hint="`spr-cluster k8s status` lists the jobs; if it was deleted, name its --claim and --image",
    )


def _fetch_log(api: KubernetesApi, pod: PodView, target: Path, note: Callable[[str], None]) -> None:
    with target.open("w", encoding="utf-8") as file:
        try:
            read_log(api, pod, lambda line: print(line, file=file), note)
        except KubernetesError as error:
            _warn(f"the log is incomplete: {error.message}")


def _warn(text: str) -> None:
    print(text, file=sys.stderr)
