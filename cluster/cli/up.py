"""``spr-cluster up``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from cluster.cli.common import (
    SubParsers,
    add_cluster_options,
    add_command,
    confirm,
    open_chosen_cloud,
    open_context,
)

if TYPE_CHECKING:
    from cluster.lifecycle import Context
    from cluster.nodes import Cluster
    from infra.cloud import Cloud
    from infra.plan import Plan
    from infra.spec import ClusterSpec

_EXAMPLES = """\
  spr-cluster up --nodes 4
  spr-cluster up --nodes 2 --instance-type c7i.metal-24xl --ttl 3h --yes
  spr-cluster up --nodes 2 --cloud local        in containers on this machine: no account, no cost
"""


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "up",
        "buy, install, connect and verify a cluster",
        "Make a cluster: a head node with the software installed, an image of it, the workers from\n"
        "that image, SSH between all of them, and a check of AMX on each.",
        _EXAMPLES,
    )
    add_cluster_options(parser)
    parser.add_argument(
        "--nodes", type=int, default=1, help="nodes, the head included (default: 1)"
    )
    parser.add_argument(
        "--instance-type", default="r7iz.metal-16xl", help="EC2 type (default: r7iz.metal-16xl)"
    )
    parser.add_argument(
        "--stack", help="intel or upstream (default: intel on AWS, upstream on the embedded cloud)"
    )
    parser.add_argument(
        "--ttl", default="8h", help="the nodes end themselves after this time (default: 8h)"
    )
    parser.add_argument(
        "--ssh-cidr", help="addresses that may use SSH (default: this machine's own, as /32)"
    )
    parser.add_argument("--subnet-id", help="a subnet (default: one of the default VPC)")
    parser.add_argument(
        "--volume-gib", type=int, default=100, help="each node's disk in GiB (default: 100)"
    )
    parser.add_argument(
        "--allow-no-amx", action="store_true", help="go on where the processor has no AMX"
    )
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask before buying")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from cluster.cli.display import make_progress
    from cluster.lifecycle import Up, check_name_is_free
    from infra.plan import plan_up
    from provision.stacks import load_stack

    _check_offline(args)
    progress = make_progress()
    cloud = open_chosen_cloud(args, making=True, progress=progress)
    stack = load_stack(args.stack or cloud.default_stack)
    spec = build_wish(args, cloud, stack.name)
    ctx = open_context(args, cloud, progress=progress)
    check_name_is_free(ctx, spec.name)
    up = Up(ctx, spec, stack)
    plan = plan_up(spec)
    if cloud.billed:
        print(render_offer(spec, plan, cloud, up.network.zone), file=sys.stderr)
        confirm("Make this cluster?", yes=args.yes)
    try:
        with progress.phase(
            f"Cluster {spec.name} of {spec.nodes} nodes, {cloud.name} {cloud.region}"
        ):
            cluster = up.apply(plan)
    except BaseException:
        _say_what_exists(ctx, spec.name)
        raise
    _report(cluster, cloud, as_json=args.json)
    return 0


def _check_offline(args: argparse.Namespace) -> None:
    """Judge the options before anything is started or asked: a mistake costs no time."""
    from infra.cloud import DEFAULT_REGION, Cloud
    from provision.stacks import load_stack

    stack = load_stack(args.stack).name if args.stack else ""
    nowhere = Cloud("", DEFAULT_REGION, lambda: "0.0.0.0/32", "", billed=False, has_amx=False)
    build_wish(args, nowhere, stack)


def build_wish(args: argparse.Namespace, cloud: Cloud, stack: str) -> ClusterSpec:
    """The options as a validated spec."""
    from infra.spec import build_spec, parse_ttl

    return build_spec(
        name=args.name,
        nodes=args.nodes,
        stack=stack,
        instance_type=args.instance_type,
        ssh_cidr=args.ssh_cidr or cloud.caller_cidr(),
        subnet_id=args.subnet_id,
        volume_gib=args.volume_gib,
        ttl=parse_ttl(args.ttl),
        amx_required=cloud.has_amx and not args.allow_no_amx,
    )


def render_offer(spec: ClusterSpec, plan: Plan, cloud: Cloud, zone: str) -> str:
    """What ``up`` will create and what it costs, before anything is bought."""
    from infra.catalogue import PRICES_AS_OF

    steps = "\n".join(f"  {action.title}" for action in plan.actions)
    hours = spec.ttl.total_seconds() / 3600
    return (
        f"Cluster {spec.name} in {cloud.region} ({zone}):\n{steps}\n"
        f"Price: ${plan.usd_per_hour:.2f} an hour ({spec.nodes} x ${spec.machine.usd_per_hour:.4f}, "
        f"{PRICES_AS_OF}), disks, image and traffic besides.\n"
        f"Quota: {spec.nodes * spec.machine.vcpus} vCPUs of your on-demand standard instances.\n"
        f"At most ${plan.usd_at_most:.2f}: the nodes end themselves after {hours:g} h (--ttl), "
        f"or at `spr-cluster down`."
    )


def _say_what_exists(ctx: Context, name: str) -> None:
    """After a failure or Ctrl-C: what is there now, and how to be rid of it."""
    from infra.inventory import describe_inventory

    cloud = ctx.cloud
    command = f"spr-cluster down --name {name} --cloud {cloud.name} --region {cloud.region}"
    lines = ["", f"`up` did not finish. To remove what it made:  {command}"]
    try:
        found = describe_inventory(ctx.clients.ec2, name)
    except Exception as error:
        lines.append(f"What exists could not be listed: {error}")
    else:
        cost = ", and costs money" if cloud.billed else ""
        nothing = (
            "EC2 shows nothing of it now. A machine bought in the last seconds may not show yet: "
        )
        lines.append(
            f"It exists now{cost}: {found}"
            if found
            else f"{nothing}look again in a minute with `spr-cluster status --name {name}`."
        )
    print("\n".join(lines), file=sys.stderr)


def _report(cluster: Cluster, cloud: Cloud, *, as_json: bool) -> None:
    if as_json:
        nodes = [node.as_dict() for node in cluster.nodes]
        where = {"cluster": cluster.name, "cloud": cloud.name, "region": cloud.region}
        print(json.dumps({**where, "stack": cluster.stack, "nodes": nodes}))
        return
    for node in cluster.nodes:
        print(f"{node.name}  {node.instance.id}  {node.public_ip}")
    print("Next: spr-cluster train squad   (and in the end: spr-cluster down)")
