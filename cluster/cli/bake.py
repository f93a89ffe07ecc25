"""``spr-cluster bake``: an image ahead of time, on the cheapest machine that can make it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from cluster.cli.common import SubParsers, add_cloud_options, add_command, confirm, open_context
from infra.catalogue import BAKERS

if TYPE_CHECKING:
    from cluster.context import Context
    from infra.images import Image

_EXAMPLES = """\
  spr-cluster bake
  spr-cluster bake --stack upstream --yes
  spr-cluster bake --cloud local
"""
# Room for the software and its cache; a machine's disk may be larger than its image's, not smaller.
_VOLUME_GIB = 30
_TTL_H = 3


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "bake",
        "make an image ahead of time, so that `up` installs nothing",
        "Start one small virtual machine, install a stack on it, make an image, and give the machine\n"
        "back. Every later `up` with this stack finds the image, from any laptop, under any name.\n"
        "Run again after an interruption it continues; where the image exists it does nothing.",
        _EXAMPLES,
    )
    add_cloud_options(parser)
    parser.add_argument("--stack", metavar="NAME", help="software, see `stacks` (default: as `up`)")
    parser.add_argument(
        "--instance-type",
        metavar="TYPES",
        help="the machine that installs, or several in the order of preference "
        f"(default: {','.join(BAKERS)})",
    )
    parser.add_argument("--ssh-cidr", help="addresses that may use SSH (default: this machine's)")
    parser.add_argument("--subnet-id", help="a subnet (default: one of the default VPC)")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask before buying")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from cluster.cli.display import make_progress
    from infra.clouds import open_cloud
    from provision.recipe import recipe_digest
    from provision.stacks import load_stack

    if args.stack is not None:
        load_stack(args.stack)
    progress = make_progress()
    cloud = open_cloud(args.cloud or "aws", args.region, progress)
    stack = load_stack(args.stack or cloud.default_stack)
    recipe = recipe_digest(stack, cloud.base)
    args.name = f"bake-{recipe}"
    ctx = open_context(args, cloud, progress=progress)
    with ctx.files.lock():
        image, made = _bake(ctx, args, stack.name)
    if args.json:
        told = {"image": image.id, "stack": stack.name, "recipe": recipe, "made": made}
        print(json.dumps({**told, "region": cloud.region}))
    elif made:
        print(f"{image.id} has stack {stack.name}: the next `up` with it installs nothing.")
        print(f"To be rid of it: spr-cluster images delete {image.id}")
    else:
        print(f"{image.id} has stack {stack.name} already (`spr-cluster images list`).")
    return 0


def _wishes(args: argparse.Namespace, stack: str) -> dict[str, Any]:
    from datetime import timedelta

    types = args.instance_type.split(",") if args.instance_type else BAKERS
    wishes = {
        "nodes": 1,
        "stack": stack,
        "instance_types": tuple(name.strip() for name in types if name.strip()),
        "amx_required": False,
        "volume_gib": _VOLUME_GIB,
        "ttl": timedelta(hours=_TTL_H),
        "bake": "head",
        "placement_group": False,
    }
    return {**wishes, "subnet_id": args.subnet_id} if args.subnet_id else wishes


def _bake(ctx: Context, args: argparse.Namespace, stack: str) -> tuple[Image, bool]:
    """The image, and whether it was made now; the machine that made it is gone."""
    from cluster.cli.offer import propose
    from cluster.cli.up import apply_proposal
    from cluster.down import down
    from cluster.lifecycle import observe, prepare
    from infra.tags import KEPT

    situation = prepare(ctx, args.name, _wishes(args, stack), args.ssh_cidr, wants_image=True)
    image = situation.image
    if image is None or image.state != "available":
        proposal = propose(ctx, situation)
        if ctx.cloud.billed:
            print(proposal.render(), file=sys.stderr)
            proposal.require_quota()
            confirm("Do it?", yes=args.yes)
        apply_proposal(proposal, yes=True, again=f"bake --stack {stack}")
        made = [i for i in observe(ctx, args.name).images if i.holds(situation.recipe)]
        image = made[0]
    elif image.tags.get(KEPT) == "yes" and not situation.found.without_image():
        return image, False
    with ctx.progress.phase("Give the machine back"):
        down(ctx, args.name, keep_image=True)
    return image, True
