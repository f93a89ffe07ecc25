"""``spr-cluster local``: the embedded cloud on this machine."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import asdict

from cluster.console.display import make_progress
from cluster.console.output import emit
from cluster.console.parser import SubParsers, add_command, add_json_option
from cluster.local_files import ClusterFiles, cluster_names
from infra.aws.clients import connect
from infra.local.cloud import LocalStatus, open_local_cloud, reset, status, stop
from infra.local.machines.base_image import BASES, DEFAULT_BASE
from infra.s3_url import parse_s3_url

_EXAMPLES = """\
  spr-cluster local status
  spr-cluster local stop                 # resumes with the next --cloud local
  spr-cluster local reset --keep-base    # remove all but the base image
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "local",
        "Manage the embedded cloud: EC2's API on this machine, with containers as instances. "
        "Any command with `--cloud local` starts it.",
        _EXAMPLES,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    status = add_command(
        actions,
        "status",
        "Show the server and everything in the embedded cloud: networks, instances, and images.",
        "  spr-cluster local status --json\n",
        "show the server, networks, instances, and images",
        run_status,
    )
    add_json_option(status, "the status")
    stop = add_command(
        actions,
        "stop",
        "Stop the server and the instances. The next command with `--cloud local` restarts them with "
        "the same disks and addresses.",
        "  spr-cluster local stop\n",
        "stop the server and the instances; keep their state",
        run_stop,
    )
    add_json_option(stop, "the new status")
    reset = add_command(
        actions,
        "reset",
        "Remove the embedded cloud with all its instances and images, in any state.",
        "  spr-cluster local reset\n  spr-cluster local reset --base debian13\n",
        "remove the embedded cloud",
        run_reset,
    )
    reset.add_argument(
        "--keep-base",
        action="store_true",
        help="keep the base image, which takes a minute or two to build",
    )
    reset.add_argument(
        "--base",
        choices=BASES,
        default=DEFAULT_BASE,
        help="base image of the next embedded cloud: Ubuntu 24.04, or this machine's distribution where no "
        "registry offers it; or Debian 13 (default: %(default)s)",
    )
    add_json_option(reset, "the new status")
    bucket = add_command(
        actions,
        "bucket",
        "Create an S3 bucket in the embedded cloud, for `up --bucket`, and show how to use it.",
        "  spr-cluster local bucket my-results\n",
        "create an S3 bucket",
        run_bucket,
    )
    bucket.add_argument("name", metavar="NAME", help="the bucket's name")
    add_json_option(bucket, "the bucket's URL, its endpoint, and the credentials")


def run_status(args: argparse.Namespace) -> int:
    found = status()
    emit(args, "\n".join(_render(found)), asdict(found))
    return 0


def run_stop(args: argparse.Namespace) -> int:
    stop()
    return run_status(args)


def run_reset(args: argparse.Namespace) -> int:
    folder = status().folder
    reset(keep_base=args.keep_base, base=args.base)
    for name in cluster_names(folder):
        ClusterFiles.of(name).remove()
    return run_status(args)


def run_bucket(args: argparse.Namespace) -> int:
    place = parse_s3_url(f"s3://{args.name}", "local bucket")
    cloud = open_local_cloud("us-east-1", make_progress())
    s3 = connect(cloud).s3
    with contextlib.suppress(s3.exceptions.BucketAlreadyOwnedByYou):
        s3.create_bucket(Bucket=place.bucket)
    key, secret = cloud.credentials or ("", "")
    given = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    given |= {"AWS_ENDPOINT_URL_S3": str(cloud.endpoint_url), "AWS_REGION": "us-east-1"}
    lines = [str(place), "To use it with boto3 or the AWS CLI:"]
    lines += [f"  export {name}={value}" for name, value in given.items()]
    emit(args, "\n".join(lines), {"url": str(place), **given})
    return 0


def _render(found: LocalStatus) -> Iterator[str]:
    resources = found.resources
    server = f"running at {found.endpoint} (pid {found.pid})" if found.running else "not running"
    yield f"{'server':12} {server}"
    yield f"{'state':12} {found.folder}"
    for name, ranges in resources.networks.items():
        yield f"{'network':12} {ranges} ({name})"
    for instance in resources.instances:
        yield f"{'instance':12} {instance.id} {instance.state} ({instance.region})"
    for image in resources.images:
        yield f"{'image':12} {image}"
    for image in resources.base_images:
        yield f"{'base image':12} {image}"
    if not (resources.networks or resources.instances or resources.images):
        yield "No networks, instances, or images."
