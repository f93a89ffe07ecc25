"""``spr-cluster k8s delete``."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from cluster.cli.common import confirm
from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from infra.errors import UsageError
from jobs.cli.k8s.common import add_job_options, open_api
from jobs.launchers.kubernetes.jobs import delete_claim, delete_job, find_claim_users, find_job
from jobs.launchers.kubernetes.request import Claim
from jobs.launchers.kubernetes.resources import JobView

if TYPE_CHECKING:
    from jobs.launchers.kubernetes.api import KubernetesApi

_EXAMPLES = """\
  spr-cluster k8s delete squad-20261122-142501-k3f
  spr-cluster k8s delete squad-20261122-142501-k3f --claim --yes
"""


def add_parser(actions: SubParsers) -> None:
    parser = add_command(
        actions,
        "delete",
        "End a job, delete it, and wait until its pods are gone. Its files stay on the claim, so a job with "
        "the same name and options resumes from its newest checkpoint. If there is no such job, nothing "
        "happens.",
        _EXAMPLES,
        help_="end and delete a job",
    )
    add_job_options(parser)
    add = parser.add_argument
    text = "also delete its claim, with the files of all jobs on it, unless others use it"
    add("--claim", action="store_true", help=text)
    add("--yes", "-y", action="store_true", help="delete without asking")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    api, progress = open_api(args), make_progress()
    job = find_job(api, args.job)
    claim = _choose_claim(api, job, args) if args.claim else ""
    if job is None:
        text = f"No job {args.job} in namespace {api.namespace}: nothing to delete."
    else:
        files = (
            f" and claim {claim} with all of its files"
            if claim
            else "; its files stay on the claim"
        )
        confirm(f"Delete job {args.job} ({job.state}){files}?", yes=args.yes)
        with progress.phase(f"Delete job {args.job}"):
            delete_job(api, job, progress.note)
            if claim:
                delete_claim(api, claim, progress.note)
        text = f"Job {args.job} is gone." + (f" Claim {claim} is gone." if claim else "")
    result = {"job": args.job, "deleted": job is not None, "claim": claim or None}
    print(json.dumps(result) if args.json else text)
    return 0


def _choose_claim(api: KubernetesApi, job: JobView | None, args: argparse.Namespace) -> str:
    """Return the claim to delete. Raises :class:`UsageError` if it is not known, or is others', too."""
    if job is None:
        raise UsageError(
            f"no job {args.job} in namespace {api.namespace}, so its claim is not known",
            hint="with the files of all jobs on it, this deletes the usual one: "
            f"kubectl --context {api.context} -n {api.namespace} delete pvc {Claim().name}",
        )
    if job.claim and (users := find_claim_users(api, job)):
        raise UsageError(
            f"claim {job.claim} is also that of {', '.join(users)}; nothing was deleted",
            hint="delete those first, or omit --claim",
        )
    return job.claim
