"""``spr-cluster stacks check --from-machine``: the same questions, from a small machine in the cloud."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cluster.cli.common import confirm, open_context
from infra.catalogue import BAKERS

if TYPE_CHECKING:
    from cluster.cli.offer import Proposal
    from cluster.context import Context
    from cluster.nodes import Cluster
    from infra.buying import Offer
    from infra.progress import Progress
    from provision.stack_check import SourcesReport
    from provision.stacks import Stack

_MACHINE_OPTIONS = ("cloud", "region", "instance_type", "yes")


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--from-machine``, and what is of use with it alone."""
    parser.add_argument(
        "--from-machine",
        action="store_true",
        help="ask from a small virtual machine, bought for it and given back; Ubuntu's packages too",
    )
    parser.add_argument("--cloud", choices=("aws", "local"), help="its cloud (default: aws)")
    parser.add_argument("--region", help="its AWS region (default: your AWS configuration's)")
    parser.add_argument(
        "--instance-type",
        metavar="TYPES",
        help=f"its type, or several in the order of preference (default: {','.join(BAKERS)})",
    )
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask before buying")


def check_options(args: argparse.Namespace) -> None:
    """Raises :class:`UsageError` for options of a machine without one, and the other way round."""
    from infra.errors import UsageError

    given = [name for name in _MACHINE_OPTIONS if getattr(args, name)]
    if given and not args.from_machine:
        option = given[0].replace("_", "-")
        raise UsageError(f"--{option} is for --from-machine alone", hint="add --from-machine")
    if args.from_machine and not args.names:
        raise UsageError(
            "--from-machine needs the name of a stack",
            hint="each is asked about from a machine of its own: `spr-cluster stacks` lists them",
        )
    if args.from_machine and args.isolated:
        raise UsageError("--isolated is about this machine's pip: leave it out with --from-machine")


def check_from_machine(args: argparse.Namespace, stack: Stack, progress: Progress) -> SourcesReport:
    """One stack's sources as a node sees them; the machine is given back whatever happens."""
    from cluster.cli.bake import wish_small_machine
    from cluster.cli.offer import propose
    from cluster.down import down
    from cluster.lifecycle import prepare
    from infra.clouds import open_cloud
    from provision.recipe import recipe_digest
    from provision.remote_check import check_from_host

    cloud = open_cloud(args.cloud or "aws", args.region, progress)
    args.name = f"check-{recipe_digest(stack, cloud.base)}"
    ctx = open_context(args, cloud, progress=progress)
    with ctx.files.lock():
        wishes = wish_small_machine(args.instance_type, stack.name)
        situation = prepare(ctx, args.name, wishes, None)
        proposal = propose(ctx, dataclasses.replace(situation, bare=True, cached=()))
        if cloud.billed:
            print(proposal.render(), file=sys.stderr)
            proposal.require_quota()
            confirm("Do it?", yes=args.yes)
        try:
            head = _buy(ctx, proposal).head
            progress.note(f"asking from {head.instance.id}")
            return check_from_host(ctx.host_opener()(head), stack, progress, limit_s=args.timeout)
        finally:
            with progress.phase(f"Give the machine back ({ctx.flags})"):
                down(ctx, args.name)


def _buy(ctx: Context, proposal: Proposal) -> Cluster:
    from cluster.lifecycle import bring_up, find_offers
    from infra.errors import SprError, UsageError

    situation = proposal.situation

    @functools.cache
    def offers() -> Sequence[Offer]:
        return proposal.offers or find_offers(ctx, situation)

    try:
        with ctx.progress.phase(f"A machine in {ctx.cloud.name} {ctx.cloud.region}"):
            return bring_up(ctx, situation, proposal.plan, offers)
    except UsageError as failure:
        # Exit code 2 would say that nothing was changed.
        raise SprError(failure.message, hint=failure.hint) from None
