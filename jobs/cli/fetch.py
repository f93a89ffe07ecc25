"""``spr-cluster fetch``, and ``--push-to`` for all commands that have it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.common import add_cluster_options, open_chosen_cloud, open_context
from cluster.cli.display import make_progress
from cluster.cli.parser import SubParsers, add_command
from cluster.nodes import find_cluster
from infra.errors import JobError, SprError, UsageError
from infra.progress import Progress
from infra.s3 import S3Location, check_s3_location, connect_s3, parse_s3_url
from jobs.launch.files import fetch
from jobs.launch.history import RUNNING, check_job_id, choose_job, list_jobs
from jobs.launch.plan import JobPaths
from jobs.launch.record import write_job_id
from jobs.train.push import push_results
from jobs.train.request import check_folder, check_holder, expand_home

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client


_EXAMPLES = """\
  spr-cluster fetch --last
  spr-cluster fetch squad-20260731-142501 --results ./best
  spr-cluster fetch --last --push-to s3://my-models/squad
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "fetch",
        "Bring the model, log and results of a job from the cluster's head: one that was followed\n"
        "from another machine, or has ended while nobody looked. `spr-cluster jobs` lists them.",
        _EXAMPLES,
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="such as squad-20260731-142501")
    parser.add_argument("--last", action="store_true", help="the newest job on the head")
    parser.add_argument(
        "--results", metavar="DIR", help="local folder for the files (default: results/JOB)"
    )
    add_push_option(parser)
    add_cluster_options(parser)
    parser.set_defaults(run=run)


def add_push_option(parser: argparse.ArgumentParser) -> None:
    """``--push-to``, which :func:`open_place` reads."""
    parser.add_argument(
        "--push-to",
        metavar="s3://BUCKET/PREFIX",
        help="store the model in S3, too, in a folder named like the job; with this machine's AWS "
        "credentials, private and encrypted as the bucket is",
    )


def open_place(args: argparse.Namespace) -> tuple[S3Client, S3Location] | None:
    """Where to push to, and that one may; raises :class:`infra.errors.UsageError` before the work."""
    if args.push_to is None:
        return None

    place = parse_s3_url(args.push_to)
    s3 = connect_s3()
    check_s3_location(s3, place)
    return s3, place


def push(
    opened: tuple[S3Client, S3Location] | None, results: Path, job: str, progress: Progress
) -> str | None:
    """Store the results where :func:`open_place` has led; returns that place."""
    if opened is None:
        return None

    s3, place = opened
    try:
        return str(push_results(s3, results, place, job, progress))
    except SprError as error:
        raise JobError(
            f"the results are in {results}/, but were not stored in S3: {error.message}",
            hint=f"then again: spr-cluster fetch {job} --push-to {place}",
        ) from error


def run(args: argparse.Namespace) -> int:

    if bool(args.job) == args.last:
        raise UsageError("which job? expected a job's id or --last", hint="spr-cluster jobs")
    if args.job:
        check_job_id(args.job)
    if args.results:
        check_folder(expand_home(args.results))
    opened = open_place(args)
    progress = make_progress()
    ctx = open_context(args, open_chosen_cloud(args), progress=progress)
    head = ctx.host_opener()(find_cluster(ctx.clients.ec2, args.name).head)
    found = choose_job(list_jobs(head), args.job)
    results = expand_home(args.results) if args.results else Path("results", found.job)
    if found.state == RUNNING:
        print(f"{found.job} is still running: this is what it has so far", file=sys.stderr)
    check_holder(results, found.job)
    with progress.phase(f"Fetch {found.job}"):
        write_job_id(results, found.job)
        fetch(head, JobPaths(found.job), results)
    pushed = push(opened, results, found.job, progress)
    if args.json:
        print(json.dumps({**found.as_dict(), "results": str(results), "pushed_to": pushed}))
    else:
        print(f"{found.job} ({found.state}): {results}/" + (f"\n{pushed}" if pushed else ""))
    return 0
