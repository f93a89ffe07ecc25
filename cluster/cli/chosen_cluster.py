"""The cluster that a command acts on: its options, its context, and its owner."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.console.options import JsonRequest, Request, option
from cluster.console.output import ask, ask_for, confirm, has_terminal, say
from cluster.context import Context
from cluster.local_files import (
    ClusterFiles,
    describe_failure,
    known_clusters,
    nearest_cluster,
    remembered_account,
    remembered_cloud,
)
from infra.aws.caller import Caller, is_same_owner
from infra.aws.clients import connect, has_credentials, translate_boto_error
from infra.aws.cloud import (
    CREDENTIALS_HINT,
    DEFAULT_REGION,
    NO_CREDENTIALS,
    Cloud,
    MissingCredentialsError,
    NoRegionError,
    find_profile,
    open_aws_cloud,
)
from infra.ec2.inventory import Inventory
from infra.errors import NoClusterError, SprError, UsageError
from infra.spec import AUTO, DEFAULT_NAME, parse_ssh_cidr
from infra.wait import Progress, Silent

CLOUD_NAMES = ("aws", "local")
_CLOUD = "AWS, or containers on this machine (default: {})"
_CONFIGURED = "AWS_REGION, else your AWS configuration"


@dataclass(frozen=True, kw_only=True)
class CloudRequest(JsonRequest):
    """A request to a cloud."""

    cloud: str | None = option(_CLOUD.format("aws"), choices=CLOUD_NAMES)
    region: str | None = option(f"AWS region (default: {_CONFIGURED})")


@dataclass(frozen=True, kw_only=True)
class ClusterRequest(CloudRequest):
    """A request about an existing cluster."""

    name: str | None = option("the cluster (default: the only one that this machine knows, or spr)")
    cloud: str | None = option(_CLOUD.format("the cluster's, or aws"), choices=CLOUD_NAMES)
    region: str | None = option(f"AWS region (default: the cluster's, else {_CONFIGURED})")

    @property
    def is_named(self) -> bool:
        """Whether the user chose the cluster by its name."""
        return self.name is not None


def choose_cluster(
    request: ClusterRequest, *, yes: bool = False, tell: Callable[[str], None] = say
) -> str:
    """Return the named cluster, else the only one whose key this machine has, else ``spr``.

    Raises :class:`UsageError` for an invalid name, or if the choice would be a guess: among several
    clusters without ``spr``, or any without ``spr`` if ``--yes`` prevents a question.
    """
    if request.name is not None:
        ClusterFiles.of(request.name)
        return request.name
    known = _clusters_with_key(request.cloud)
    names = list(known)
    if DEFAULT_NAME in names or not names:
        return DEFAULT_NAME
    if yes:
        raise UsageError(
            "--yes needs --name: a cluster is never guessed without asking",
            hint=f"this machine knows {_list_places(known)}",
        )
    if len(names) > 1:
        raise UsageError(
            f"which cluster? This machine knows {_list_places(known)}", hint="--name chooses one"
        )
    tell(f"cluster {names[0]}, the only one that this machine knows")
    return names[0]


def _clusters_with_key(cloud: str | None = None) -> dict[str, tuple[str, str]]:
    """Return the clusters whose key this machine has; of others, it only remembers a kept image."""
    known = known_clusters(cloud).items()
    return {name: place for name, place in known if ClusterFiles.of(name).key.exists()}


def open_chosen_cloud(
    request: ClusterRequest,
    name: str,
    *,
    progress: Progress | None = None,
    must_exist: bool = True,
    buys: bool = False,
) -> Cloud:
    """Return the cloud from the options, else the one in which the cluster was made.

    Raises :class:`UsageError` if the cluster must exist, is unknown, and there are no credentials to search.
    """
    place = remembered_cloud(name)
    made_in, region = place or ("aws", None)
    chosen = request.cloud or made_in
    region = request.region or (region if chosen == made_in else None)
    is_unknown = must_exist and not (place or request.cloud or request.region)
    try:
        cloud = open_place(chosen, region, progress or Silent(), buys=buys)
        if has_credentials(cloud):
            return cloud
        raise MissingCredentialsError(NO_CREDENTIALS, hint=CREDENTIALS_HINT)
    except MissingCredentialsError as error:
        if not is_unknown:
            error.hint = command_with_profile(name, request.words) or error.hint
            raise
    raise _unknown_cluster(name)


def open_cloud(name: str, region: str | None, progress: Progress, *, buys: bool = False) -> Cloud:
    """Return the named cloud; start the embedded one if necessary.

    ``buys`` makes assumed-role credentials last until the machines are installed.
    Raises :class:`UsageError` if the name is unknown or the embedded cloud cannot run here.
    """
    if name == "local":
        from infra.local.cloud import open_local_cloud  # noqa: PLC0415 - optional: needs moto

        return open_local_cloud(region or DEFAULT_REGION, progress)
    if name == "aws":
        return open_aws_cloud(region, buys=buys)
    raise UsageError(f"unknown cloud {name!r}: one of {', '.join(CLOUD_NAMES)}")


def open_place(cloud: str, region: str | None, progress: Progress, *, buys: bool = False) -> Cloud:
    """Open a cloud; ask on a terminal for AWS's region if none is configured.

    Raises :class:`UsageError` without a terminal, because machines in an unexpected region get lost.
    """
    try:
        return open_cloud(cloud, region, progress, buys=buys)
    except NoRegionError:
        if not has_terminal():
            raise
        chosen = ask_for("AWS region, such as us-east-1:") or None
        return open_cloud(cloud, chosen, progress, buys=buys)


def _unknown_cluster(name: str) -> NoClusterError:
    elsewhere = "AWS credentials find clusters made on other machines: `aws configure`"
    if known := known_clusters() if name != DEFAULT_NAME else _clusters_with_key():
        return NoClusterError(
            f"this machine knows no cluster {name!r}{nearest_cluster(name)}",
            hint=f"it knows {_list_places(known)}; {elsewhere}",
        )
    named = "" if name == DEFAULT_NAME else f" --name {name}"
    return NoClusterError(
        "no cluster yet",
        hint=f"`spr-cluster up --nodes 2{named}` creates one on AWS, and `spr-cluster up --nodes 2"
        f"{named} --cloud local` one in containers on this machine, without an account; {elsewhere}",
    )


def _list_places(known: Mapping[str, tuple[str, str]]) -> str:
    return " and ".join(f"{name} ({' '.join(place)})" for name, place in known.items())


def open_context(request: Request, name: str, cloud: Cloud, **more: Any) -> Context:
    """Return the context of a cluster.

    Raises :class:`UsageError` if this machine created the cluster in another account.
    """
    files = ClusterFiles.of(name)
    given = {"allow": ask, "command": request.verb, **more}
    ctx = Context(cloud=cloud, clients=connect(cloud), files=files, **given)
    _check_account(ctx, request.words)
    return ctx


def open_cluster(
    request: ClusterRequest, progress: Progress | None = None, *, yes: bool = False, **more: Any
) -> Context:
    """Choose the cluster and its cloud; return its context. With ``yes``, no cluster is guessed."""
    name = choose_cluster(request, yes=yes)
    cloud = open_chosen_cloud(request, name, progress=progress)
    return open_context(request, name, cloud, progress=progress or Silent(), **more)


def may_follow(ssh_cidr: str | None) -> Callable[[str], bool]:
    """Return the ``allow`` of a command that sets the SSH rule: yes, unless --ssh-cidr omits ``auto``."""
    return lambda _: ssh_cidr is None or AUTO in parse_ssh_cidr(ssh_cidr)


def command_with_profile(name: str, words: Sequence[str]) -> str:
    """Return a command with the AWS profile that made a cluster; "" if that is unknown or in use."""
    profile = remembered_account(name)[1]
    in_use = os.environ.get("AWS_PROFILE", "default")
    command = f"AWS_PROFILE={shlex.quote(profile)} spr-cluster {shlex.join(words)}"
    return "" if profile in ("", in_use) else command


def _check_account(ctx: Context, words: Sequence[str]) -> None:
    account, profile = remembered_account(ctx.name)
    is_there = remembered_cloud(ctx.name) == (ctx.cloud.name, ctx.cloud.region)
    if not (account and is_there) or account == ctx.clients.caller.account:
        return
    now = f" (profile {name})" if (name := find_profile(ctx.cloud.session)) else ""
    was = f" (profile {profile})" if profile else ""
    raise UsageError(
        f"cluster {ctx.name!r} was made in AWS account {account}{was}, but these credentials belong to "
        f"account {ctx.clients.caller.account}{now}",
        hint=command_with_profile(ctx.name, words)
        or f"use credentials of account {account}: set AWS_PROFILE",
    )


def record_failure(ctx: Context, failure: BaseException) -> BaseException:
    """Record the error that ends a command; return it with a hint about the event log.

    Credentials that expire are no usage error here: something may have changed.
    """
    error = translate_boto_error(failure) or failure
    if isinstance(error, UsageError) and error is not failure:
        error = SprError(error.message, hint=error.hint)
    if not ctx.files.events.exists():
        return error
    if not isinstance(error, SprError):
        ctx.events.record("error", describe_failure(error))
        return error
    ctx.events.record("error", error.message, hint=error.hint)
    log = f"spr-cluster events --name {ctx.name} shows what was done and why"
    error.hint = f"{error.hint}\n  → {log}" if error.hint else log
    return error


def other_owner(caller: Caller, owner: str) -> str:
    """Return the ARN of an owner; "" if that is the caller or unknown."""
    return "" if not owner or is_same_owner(owner, caller.owner) else owner


def confirm_owner(ctx: Context, found: Inventory, *, sure: bool) -> bool:
    """Ask before changing another user's cluster, unless the user is ``sure``: ``--yes`` with ``--name``.

    Returns whether the user was asked. Raises :class:`UsageError` if the answer is no.
    """
    owner = other_owner(ctx.clients.caller, found.owner)
    if not owner or sure:
        return False
    name = ctx.name
    whose = f"cluster {name!r} belongs to {owner}, not to {ctx.clients.caller.owner}"
    if not has_terminal():
        raise UsageError(whose, hint=f"--yes with --name {name} confirms")
    confirm(f"C{whose[1:]}. Continue?", yes=False)
    return True
