"""``spr-cluster local``: the embedded cloud on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from cluster.console.display import make_progress
from cluster.console.options import JsonRequest, argument, option, switch
from cluster.console.output import emit
from cluster.console.parser import Parser, add_command
from cluster.local_files import ClusterFiles, cluster_names
from infra.aws.clients import connect
from infra.local.cloud import LocalStatus, open_local_cloud, reset, status, stop
from infra.local.machines.base_image import BASES, DEFAULT_BASE
from infra.local.state import StateFolder
from infra.s3_url import S3Location, check_bucket_name

_EXAMPLES = """\
  spr-cluster local status
  spr-cluster local stop                 # resumes with the next --cloud local
  spr-cluster local reset --keep-base    # remove all but the base image
"""


@dataclass(frozen=True, kw_only=True)
class ResetRequest(JsonRequest):
    """The options of `local reset`."""

    keep_base: bool = switch("keep the base image, which takes a minute or two to build")
    base: str = option(
        f"base image of the next embedded cloud: Ubuntu 24.04, or Debian 13 (default: {DEFAULT_BASE})",
        DEFAULT_BASE,
        choices=tuple(BASES),
    )


@dataclass(frozen=True, kw_only=True)
class BucketRequest(JsonRequest):
    """The options of `local bucket`."""

    name: str = argument("the bucket's name", metavar="NAME")


def add_parser(parent: Parser) -> None:
    parser = add_command(
        parent,
        "local",
        "Manage the embedded cloud: EC2's API on this machine, with containers as instances. "
        "Any command with `--cloud local` starts it.",
        _EXAMPLES,
    )
    parser.expect("ACTION", "actions")
    add_command(
        parser,
        "status",
        "Show the server and everything in the embedded cloud.",
        "  spr-cluster local status --json\n",
        "show the server, networks, instances, and images",
        run_status,
        JsonRequest,
    )
    add_command(
        parser,
        "stop",
        "Stop the server and the instances. The next command with `--cloud local` restarts them with "
        "the same disks and addresses.",
        "  spr-cluster local stop\n",
        "stop the server and the instances; keep their state",
        run_stop,
        JsonRequest,
    )
    add_command(
        parser,
        "reset",
        "Remove the embedded cloud with all its instances and images, in any state.",
        "  spr-cluster local reset --base debian13\n",
        "remove the embedded cloud",
        run_reset,
        ResetRequest,
    )
    add_command(
        parser,
        "bucket",
        "Create an S3 bucket in the embedded cloud, for `up --bucket`, and show how to use it.",
        "  spr-cluster local bucket my-results\n",
        "create an S3 bucket",
        run_bucket,
        BucketRequest,
    )


def run_status(request: JsonRequest) -> int:
    found = status()
    emit(request, "\n".join(_render(found)), asdict(found))
    return 0


def run_stop(request: JsonRequest) -> int:
    stop()
    return run_status(request)


def run_reset(request: ResetRequest) -> int:
    folder = StateFolder.of_user()
    try:
        reset(keep_base=request.keep_base, base=request.base)
    finally:
        # If podman failed, the cloud remains.
        if not folder.snapshot.exists():
            for name in cluster_names(str(folder.root)):
                ClusterFiles.of(name).remove()
    return run_status(request)


def run_bucket(request: BucketRequest) -> int:
    place = S3Location(check_bucket_name(request.name, "local bucket"), "")
    cloud = open_local_cloud("us-east-1", make_progress())
    s3 = connect(cloud).s3
    with contextlib.suppress(s3.exceptions.BucketAlreadyOwnedByYou):
        s3.create_bucket(Bucket=place.bucket)
    key, secret = cloud.credentials or ("", "")
    given = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    given |= {"AWS_ENDPOINT_URL_S3": str(cloud.endpoint_url), "AWS_REGION": "us-east-1"}
    lines = [str(place), "To use it with boto3 or the AWS CLI:"]
    lines += [f"  export {name}={value}" for name, value in given.items()]
    emit(request, "\n".join(lines), {"url": str(place), **given})
    return 0


def _render(found: LocalStatus) -> Iterator[str]:
    resources = found.resources
    server = f"running at {found.endpoint} (pid {found.pid})" if found.running else "not running"
    yield f"{'server':12} {server}"
    yield f"{'state':12} {found.folder}"
    if os.geteuid() != 0:
        yield f"{'':12} root's embedded cloud is not shown: use sudo"
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
