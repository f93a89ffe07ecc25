"""Checks of whose account and whose cluster a command acts on."""

from __future__ import annotations

import argparse

from cluster.cli.common import confirm, has_terminal
from cluster.context import Context
from infra.aws.caller import is_same_owner
from infra.ec2.inventory import Inventory
from infra.errors import UsageError


def find_other_owner(ctx: Context, found: Inventory) -> str:
    """Return the ARN of whoever made a cluster, if that is not the caller; "" otherwise."""
    owner = found.owner
    return "" if not owner or is_same_owner(owner, ctx.clients.caller.owner) else owner


def confirm_owner(ctx: Context, args: argparse.Namespace, found: Inventory) -> bool:
    """Ask before a command changes somebody else's cluster; ``--yes`` with ``--name`` confirms.

    Returns whether the user was asked. Raises :class:`UsageError` if the answer is no.
    """
    owner = find_other_owner(ctx, found)
    if not owner or (args.yes and args.named):
        return False
    name = ctx.files.folder.name
    whose = f"cluster {name!r} belongs to {owner}, not to {ctx.clients.caller.owner}"
    if not has_terminal():
        raise UsageError(whose, hint=f"--yes with --name {name} confirms")
    confirm(f"C{whose[1:]}. Continue?", yes=False)
    return True
