"""``spr-cluster k8s delete``."""

from __future__ import annotations

import argparse
import json

from cluster.cli.common import confirm
from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from jobs.cli.k8s.access import add_access_options, add_name_argument, open_api
from jobs.kubernetes.jobs import delete_job, find_job
from jobs.kubernetes.resources import core_path

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
    add_name_argument(parser)
    parser.add_argument(
        "--claim",
        action="store_true",
        help="also delete its claim, with the files of all jobs on it",
    )
    parser.add_argument("--yes", "-y", action="store_true", help="delete without asking")
    add_access_options(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    api, progress = open_api(args), make_progress()
    found = find_job(api, args.job)
    if found is None:
        text = f"No job {args.job} in namespace {api.namespace}: nothing to delete."
        print(json.dumps({"job": args.job, "deleted": False, "claim": None}) if args.json else text)
        return 0
    claim = found.job.claim if args.claim else ""
    files = f"claim {claim} with all of its files" if claim else "its files stay on the claim"
    confirm(
        f"Delete job {args.job} ({found.state})" + (f" and {files}?" if claim else f"; {files}?"),
        yes=args.yes,
    )
    with progress.phase(f"Delete job {args.job}"):
        delete_job(api, found, progress.note)
        if claim:
            api.delete(core_path(api.namespace, "persistentvolumeclaims", claim))
    if args.json:
        print(json.dumps({"job": args.job, "deleted": True, "claim": claim or None}))
    else:
        print(f"Job {args.job} is gone." + (f" Claim {claim} is deleted." if claim else ""))
    return 0
