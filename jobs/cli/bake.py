"""``spr-cluster bake``: makes an image ahead of time, on the cheapest machine that can do so."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from cluster.cli.chosen_cluster import CloudRequest, may_follow, open_context, open_place
from cluster.cli.proposal import propose
from cluster.cli.spec_options import ACCESS, AccessRequest, read_spec_options, spec_options
from cluster.cli.up import apply_proposal, confirm_purchase, recording_failures
from cluster.console.display import make_progress
from cluster.console.options import YES, option, switch
from cluster.console.output import emit
from cluster.console.parser import Parser, add_request
from cluster.context import Context
from cluster.lifecycle.apply import ImageContentError
from cluster.lifecycle.down import Removed, down
from cluster.lifecycle.prepare import prepare
from infra.ec2.images import Image
from infra.ec2.tags import KEPT
from infra.errors import SprError, UsageError
from infra.instance_types import BAKERS
from infra.spec import ClusterChange, baker_name, validate_options
from infra.words import tag_value
from jobs.places.packages import check_packages, install_packages, name_packages
from jobs.places.plan import PackageList
from jobs.program.packages import find_packages
from provision.bake import recipe_digest
from provision.host import Host
from provision.install import proxy_environment
from provision.stacks.load import DEFAULT_STACK, load_stack
from provision.stacks.sources import find_resolver
from provision.stacks.stack import Stack

# Space for the software and its cache. A machine's disk can't be smaller than its image's.
_VOLUME_GIB = 30
_TTL_H = 3


@dataclass(frozen=True, kw_only=True)
class BakeRequest(AccessRequest, CloudRequest):
    """Start one small virtual machine, install a stack on it, make an image, and terminate the
    machine. Every later `up` with this stack uses the image, from any laptop, under any name.
    After an interruption, run `bake` again to continue. It does nothing if the image exists.

    examples:
      spr-cluster bake
      spr-cluster bake --stack upstream --yes
      spr-cluster bake --packages requirements.txt   also what a project needs
      spr-cluster bake --cloud local
    """

    stack: str | None = option("software, see `stacks` (default: as for `up`)", metavar="NAME")
    packages: str | None = option(
        "also install a project's packages, as `run` does: jobs with the same list then install nothing",
        metavar="FILE",
    )
    own_torch: bool = switch("let the packages replace the stack's torch", needs="--packages")
    instance_type: str | None = option(
        "type of the machine that installs, or several in order of preference "
        f"(default: {','.join(BAKERS)})",
        metavar="TYPES",
    )
    yes: bool = switch("buy without asking", flags=YES)


def add_parser(parent: Parser) -> None:
    add_request(parent, "bake", run, BakeRequest, spec_options(ACCESS))


def run(request: BakeRequest) -> int:
    if request.stack is not None:
        load_stack(request.stack)
    progress = make_progress()
    cloud = open_place(request.cloud or "aws", request.region, progress, buys=True)
    stack = load_stack(request.stack or DEFAULT_STACK)
    recipe = recipe_digest(stack, cloud.base)
    packages = _read_packages(request.packages, own_torch=request.own_torch)
    key = name_packages(packages, stack) if packages else ""
    name = baker_name(recipe, key)
    allow = may_follow(request.ssh_cidr)
    ctx = open_context(request, name, cloud, progress=progress, allow=allow)
    with ctx.files.lock(request.verb):
        image, made = _bake(ctx, request, stack, packages)
    result = {"image": image.id, "stack": stack.name, "recipe": recipe, "made": made}
    result["packages"] = image.packages
    where = f"--cloud {cloud.name} --region {cloud.region}"
    has = f"{image.id} has stack {stack.name}" + (f" and {packages}" if packages else "")
    text = f"Up to date: {has}"
    if made:
        text = (
            f"{has}: the next `up` with it installs nothing.\n"
            f"To delete it: spr-cluster images --delete {image.id} {where}"
        )
    emit(request, text, {**result, "region": cloud.region})
    return 0


def _read_packages(file: str | None, *, own_torch: bool) -> PackageList | None:
    packages = find_packages(file or "none", Path(), None)
    if file not in (None, "none") and not (packages and packages.lines):
        raise UsageError(f"--packages {file}: it lists no packages")
    return packages and replace(packages, own_torch=own_torch)


def _describe_baker(request: BakeRequest, name: str, stack: str) -> ClusterChange:
    given = read_spec_options(request.given)
    if request.instance_type:
        types = request.instance_type.split(",")
        given["instance_types"] = tuple(each.strip() for each in types if each.strip())
    return validate_options(
        name=name,
        nodes=1,
        stack=stack,
        amx_required=False,
        volume_gib=_VOLUME_GIB,
        ttl=timedelta(hours=_TTL_H),
        bake="head",
        placement_group=False,
        **given,
    )


def _bake(
    ctx: Context, request: BakeRequest, stack: Stack, packages: PackageList | None
) -> tuple[Image, bool]:
    """Return the image and whether this call made it; terminate the machine that did."""

    def install(head: Host) -> None:
        if packages:
            environment = proxy_environment(plan_input.spec.proxy or "", ctx.cloud.region)
            install_packages(head, packages, stack, ctx.progress.note, environment)

    change = _describe_baker(request, ctx.name, stack.name)
    again, label = shlex.join(word for word in request.words if word not in YES), ""
    if packages:
        label = tag_value(f"{name_packages(packages, stack)} {packages.source}")
    plan_input = prepare(
        ctx,
        change,
        request.ssh_cidr,
        wants_image=True,
        packages=label,
        unless_recorded={"instance_types": BAKERS},
    )

    def terminate(*, keep_image: bool) -> Removed:
        phase = ctx.progress.phase("Terminate the machine")
        with recording_failures(ctx, plan_input.now, again), phase:
            return down(ctx, keep_image=keep_image)

    image = plan_input.image
    if image is None or image.state != "available":
        proposal = propose(ctx, plan_input)
        if ctx.cloud.billed:
            if packages:
                check_packages(packages, stack, find_resolver())
            proposal = confirm_purchase(proposal, yes=request.yes)
        try:
            apply_proposal(proposal, yes=True, again=again, before_image=install)
        except ImageContentError:
            terminate(keep_image=False)
            raise
    elif image.tags.get(KEPT) == "yes" and not plan_input.found.without_image():
        return image, False
    kept = terminate(keep_image=True).kept.images
    made = [image for image in kept if image.holds(plan_input.recipe, label)]
    if not made:
        raise SprError(
            "no image was made; the machine was terminated", hint="run the same command again"
        )
    return made[0], True
