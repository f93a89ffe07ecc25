"""Wall time of a warm `up`, paired with a bare boto3 script that makes the same purchase.

`python -m benchmarks.purchase_time [--sizes N …] [--pairs N]`

Both are processes of their own: they make the group with its rules, the key pair, and the placement group,
buy the machines from the cluster's image, and wait until EC2 calls them running. `up` also looks for what
exists, plans, and checks, before it spends anything. It is stopped before the first connection over SSH.
EC2's API is the embedded cloud's; its machines run at once.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import finish
from cluster.context import Context
from infra.ec2.key_pair import generate_key_pair
from tests.harness.cloud import CALLER, CloudProcess, cloud_process
from tests.harness.runs import DONE, Work, run_down, run_in_process, run_keep_image, run_up

SIZES = (4, 64)
PAIRS = 5
MOST = 1.3
# The largest cluster needs 256 x 64 vCPUs.
FAULTS = "[quota]\non_demand_vcpus = 100000\n"
TAGS = [{"Key": "spr-cluster:cluster", "Value": "bert"}]


def buy_bare(ctx: Context, wish: Mapping[str, Any]) -> None:
    """Make the purchase with as few calls as boto3 allows."""
    ec2: Any = ctx.clients.ec2
    image = ec2.describe_images(Owners=["self"])["Images"][0]
    subnet = ec2.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["true"]}])[
        "Subnets"
    ][0]
    made: Any = {"GroupName": "bare", "Description": "bare", "VpcId": subnet["VpcId"]}
    group = ec2.create_security_group(**made, TagSpecifications=_tagged("security-group"))[
        "GroupId"
    ]
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": CALLER}]}
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[ssh, inside])
    ec2.authorize_security_group_egress(GroupId=group, IpPermissions=[inside])
    public = generate_key_pair("bare").public.encode()
    ec2.import_key_pair(
        KeyName="bare", PublicKeyMaterial=public, TagSpecifications=_tagged("key-pair")
    )
    ec2.create_placement_group(
        GroupName="bare", Strategy="cluster", TagSpecifications=_tagged("placement-group")
    )
    bought = ec2.run_instances(
        ImageId=image["ImageId"],
        InstanceType="r7iz.metal-16xl",
        MinCount=wish["nodes"],
        MaxCount=wish["nodes"],
        KeyName="bare",
        Placement={"GroupName": "bare"},
        NetworkInterfaces=[{"DeviceIndex": 0, "SubnetId": subnet["SubnetId"], "Groups": [group]}],
        TagSpecifications=_tagged("instance", "volume"),
    )["Instances"]
    ids = [machine["InstanceId"] for machine in bought]
    ec2.get_waiter("instance_running").wait(InstanceIds=ids)
    for page in ec2.get_paginator("describe_instances").paginate(InstanceIds=ids):
        assert page["Reservations"]


class _ReachedError(BaseException):
    """Raised instead of the first connection."""


def buy_with_up(ctx: Context, wish: Mapping[str, Any]) -> None:
    """Run `up` until it would connect to the machines."""

    def refuse(*_: Any) -> Any:
        raise _ReachedError

    with suppress(_ReachedError):
        run_up(replace(ctx, make_host=refuse), wish)


def _tagged(*kinds: str) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": TAGS} for kind in kinds]


def measure(cloud: CloudProcess, home: Path, work: Work, nodes: int) -> float:
    """Return the seconds of one purchase in a cloud with the cluster's image."""
    cloud.new(FAULTS)
    subprocess.run(["rm", "-rf", str(home)], check=True)
    for prepare, wish in ((run_up, {"nodes": 2}), (run_keep_image, {})):
        assert run_in_process(cloud, home, prepare, wish).code == DONE
    start = time.monotonic()
    run = run_in_process(cloud, home, work, {"nodes": nodes})
    seconds = time.monotonic() - start
    assert run.code == DONE, run.error
    assert run_in_process(cloud, home, run_down).code == DONE
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of nodes")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    args = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder, cloud_process(Path(folder, "cloud")) as cloud:
        for nodes in args.sizes:
            pairs = [
                [
                    measure(cloud, Path(folder, "home"), work, nodes)
                    for work in (buy_with_up, buy_bare)
                ]
                for _ in range(args.pairs)
            ]
            up, bare = (statistics.median(side) for side in zip(*pairs, strict=True))
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            figures[str(nodes)] = {
                "up_s": round(up, 2),
                "bare_s": round(bare, 2),
                "ratio": round(ratio, 2),
            }
            print(f"{nodes} nodes: up {up:.2f} s, bare boto3 {bare:.2f} s, ratio {ratio:.2f}")
    missed = [f"{n} nodes: {f['ratio']}" for n, f in figures.items() if f["ratio"] > MOST]
    finish(missed, benchmark="purchase_time", sizes=figures)


if __name__ == "__main__":
    main()
