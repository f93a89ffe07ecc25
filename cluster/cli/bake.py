"""``spr-cluster bake``: makes an image ahead of time, on the cheapest machine that can do so."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

from cluster.cli.chosen_cluster import add_cloud_options, may_follow, open_context, open_place
from cluster.cli.proposal import propose
from cluster.cli.spec_options import add_access_options, read_access_options
from cluster.cli.up import apply_proposal, confirm_purchase
from cluster.console.display import make_progress
from cluster.console.output import emit
from cluster.console.parser import SubParsers, add_command, add_yes_option
from cluster.context import Context
from cluster.lifecycle.down import down
from cluster.lifecycle.prepare import prepare
from infra.ec2.images import Image
from infra.ec2.tags import KEPT
from infra.errors import SprError
from infra.instance_types import BAKERS
from provision.bake import recipe_digest
from provision.stacks.load import DEFAULT_STACK, load_stack

_EXAMPLES = """\
  spr-cluster bake
  spr-cluster bake --stack upstream --yes
  spr-cluster bake --cloud local
"""
# Space for the software and its cache. A machine's disk can't be smaller than its image's.
_VOLUME_GIB = 30
_TTL_H = 3


def add_parser(subparsers: SubParsers) -> None:
    parser = add_command(
        subparsers,
        "bake",
        "Start one small virtual machine, install a stack on it, make an image, and terminate the\n"
        "machine. Every later `up` with this stack uses the image, from any laptop, under any name.\n"
        "After an interruption, run `bake` again to continue. It does nothing if the image exists.",
        _EXAMPLES,
        run=run,
    )
    add_cloud_options(parser)
    parser.add_argument(
        "--stack", metavar="NAME", help="software, see `stacks` (default: as for `up`)"
    )
    parser.add_argument(
        "--instance-type",
        metavar="TYPES",
        help="type of the machine that installs, or several in order of preference "
        f"(default: {','.join(BAKERS)})",
    )
    add_access_options(parser)
    add_yes_option(parser, "buy without asking")


def run(args: argparse.Namespace) -> int:
    if args.stack is not None:
        load_stack(args.stack)
    progress = make_progress()
    cloud = open_place(args.cloud or "aws", args.region, progress, buys=True)
    stack = load_stack(args.stack or DEFAULT_STACK)
    recipe = recipe_digest(stack, cloud.base)
    args.name = f"bake-{recipe}"
    ctx = open_context(args, cloud, progress=progress, allow=may_follow(args))
    with ctx.files.lock(args.verb):
        image, made = _bake(ctx, args, stack.name)
    result = {"image": image.id, "stack": stack.name, "recipe": recipe, "made": made}
    where = f"--cloud {cloud.name} --region {cloud.region}"
    text = f"Up to date: {image.id} has stack {stack.name}"
    if made:
        text = (
            f"{image.id} has stack {stack.name}: the next `up` with it installs nothing.\n"
            f"To delete it: spr-cluster images delete {image.id} {where}"
        )
    emit(args, text, {**result, "region": cloud.region})
    return 0


def _bake_options(args: argparse.Namespace, stack: str) -> dict[str, Any]:
    types = args.instance_type.split(",") if args.instance_type else BAKERS
    return {
        "nodes": 1,
        "stack": stack,
        "instance_types": tuple(name.strip() for name in types if name.strip()),
        "amx_required": False,
        "volume_gib": _VOLUME_GIB,
        "ttl": timedelta(hours=_TTL_H),
        "bake": "head",
        "placement_group": False,
        **read_access_options(args),
    }


def _bake(ctx: Context, args: argparse.Namespace, stack: str) -> tuple[Image, bool]:
    """Return the image and whether this call made it; terminate the machine that did."""
    plan_input = prepare(
        ctx, args.name, _bake_options(args, stack), args.ssh_cidr, wants_image=True
    )
    image = plan_input.image
    if image is None or image.state != "available":
        proposal = propose(ctx, plan_input)
        if ctx.cloud.billed:
            confirm_purchase(proposal, yes=args.yes)
        apply_proposal(proposal, yes=True, again=f"bake --stack {stack}")
    elif image.tags.get(KEPT) == "yes" and not plan_input.found.without_image():
        return image, False
    with ctx.progress.phase("Terminate the machine"):
        kept = down(ctx, args.name, keep_image=True).kept.images
    made = [image for image in kept if image.holds(plan_input.recipe)]
    if not made:
        raise SprError(
            "no image was made; the machine was terminated", hint="run the same command again"
        )
    return made[0], True
