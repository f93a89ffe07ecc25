"""``spr-cluster up`` and ``repair``: make a plan, then show or apply it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from cluster.cli.capacity import CapacityWait, bring_up_when_possible
from cluster.cli.chosen_cluster import (
    ClusterRequest,
    choose_cluster,
    confirm_owner,
    may_follow,
    open_chosen_cloud,
    open_context,
    record_failure,
)
from cluster.cli.doctor import check
from cluster.cli.proposal import Proposal, propose
from cluster.cli.spec_options import AccessRequest, SpecRequest, read_change, spec_options
from cluster.console.display import make_progress
from cluster.console.options import YES, option, switch
from cluster.console.output import confirm, emit, has_terminal, say, wrap
from cluster.console.parser import Parser, add_request
from cluster.context import Context
from cluster.lifecycle.apply import BeforeImage, ImageContentError
from cluster.lifecycle.busy_nodes import check_busy_nodes
from cluster.lifecycle.deadline import describe_lifetime
from cluster.lifecycle.prepare import find_offers, observe, prepare
from cluster.lifecycle.reconcile import bring_up
from cluster.local_files import describe_failure, nearest_cluster
from cluster.nodes import Cluster
from cluster.user_ssh import offer_once
from infra.aws.clients import translate_boto_error
from infra.ec2.cluster_record import parse_record
from infra.ec2.inventory import ALL_KINDS
from infra.ec2.purchase import Offer
from infra.ec2.tags import render_time
from infra.errors import SprError, UsageError
from infra.plan.actions import Plan
from infra.plan.ownership import ForeignClusterError
from infra.plan.planner import PlanInput
from infra.spec import DEFAULT_NAME, OPTIONS, ClusterChange, parse_ssh_cidr
from infra.words import counted, parse_duration, render_duration
from provision.stacks.compatibility import runs_tasks
from provision.stacks.load import load_stack


@dataclass(frozen=True, kw_only=True)
class RepairRequest(ClusterRequest, AccessRequest):
    """Replace nodes that are missing, stopped, impaired, or unreachable. If the head is missing, a
    worker becomes the head. A job that has lost a node and may run again waits for this.

    examples:
      spr-cluster repair
      spr-cluster repair --name bert --yes
    """

    dry_run: bool = switch("show the plan and its price; change nothing")
    yes: bool = switch("buy without asking", flags=YES)


@dataclass(frozen=True, kw_only=True)
class UpRequest(SpecRequest, RepairRequest):
    """Create a cluster, or change one. Nodes start from an image with the software; if there is none,
    `up` installs the software and makes an image. It connects the nodes over SSH and checks AMX on
    each. After an interruption, run `up` again to continue.

    examples:
      spr-cluster up --nodes 4 --dry-run      plan and price; changes nothing
      spr-cluster up --nodes 4 --check        would it succeed? (also `doctor`)
      spr-cluster up --nodes 2 --instance-type c7i.metal-24xl,m7i.metal-24xl --yes
      spr-cluster up --nodes 4 --market spot-or-on-demand --max-price 3
      spr-cluster up --nodes 8                grow (or shrink) an existing cluster
      spr-cluster up                          continue after Ctrl-C or a crash
      spr-cluster up --nodes 2 --cloud local  containers on this machine, free
    """

    check: bool = switch(
        "only check whether this would succeed: account, quota, permissions, network, image, and the "
        "purchase in each zone; buy and change nothing"
    )
    wait_for_capacity: str | None = option(
        "if EC2 lacks capacity, try again for this time, such as 2h, without cost", metavar="TIME"
    )


def add_parser(parent: Parser) -> None:
    add_request(parent, "up", run, UpRequest, more=spec_options())
    add_request(parent, "repair", run_repair, RepairRequest)


def run(request: UpRequest) -> int:
    if request.check:
        return check(request)
    change, wait = read_change(request), request.wait_for_capacity
    limit = parse_duration(wait, "--wait-for-capacity") if wait else None
    ctx = _open(request, change.name, must_exist=False)
    with _lock(ctx, request):
        plan_input = prepare(ctx, change, request.ssh_cidr)
        _explain_fixed(ctx, plan_input, change)
        return _carry_out(request, ctx, change, plan_input, limit)


def run_repair(request: RepairRequest) -> int:
    if request.ssh_cidr is not None:
        parse_ssh_cidr(request.ssh_cidr)
    ctx = _open(request, choose_cluster(request, yes=request.yes), must_exist=True)
    with _lock(ctx, request):
        plan_input = prepare(ctx, ClusterChange(), request.ssh_cidr)
        _require_machines(ctx, plan_input)
        return _carry_out(request, ctx, ClusterChange(), plan_input)


def _open(request: RepairRequest, name: str, *, must_exist: bool) -> Context:
    progress, buys = make_progress(), not request.dry_run
    cloud = open_chosen_cloud(request, name, progress=progress, must_exist=must_exist, buys=buys)
    return open_context(request, name, cloud, progress=progress, allow=may_follow(request.ssh_cidr))


def _lock(ctx: Context, request: RepairRequest) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if request.dry_run else ctx.files.lock(request.verb)


def _require_machines(ctx: Context, plan_input: PlanInput) -> None:
    if not (plan_input.group and parse_record(plan_input.group.tags)):
        place = f"{ctx.cloud.name} {ctx.cloud.region}"
        raise UsageError(
            f"no cluster {ctx.name!r} in {place}{nearest_cluster(ctx.name)}",
            hint=f"`spr-cluster up {ctx.flags}` creates one, `spr-cluster list` shows all clusters",
        )
    if not plan_input.found.alive:
        ttl = render_duration(plan_input.spec.ttl)
        raise UsageError(
            f"cluster {ctx.name!r} has no machines",
            hint=f"`spr-cluster up {ctx.flags}` creates them, with a new time to live of {ttl}",
        )


def _explain_fixed(ctx: Context, plan_input: PlanInput, change: ClusterChange) -> None:
    """Say that a cluster with machines keeps its end."""
    fixed = [OPTIONS[key].flag for key in ("ttl", "grace") if key in change.given]
    if fixed and plan_input.found.alive:
        ends = describe_lifetime(plan_input.record, ctx.now())
        are = "is" if len(fixed) == 1 else "are"
        text = f"{' and '.join(fixed)} {are} for new clusters. This one still shuts down {ends}."
        say(f"{text} To extend: spr-cluster extend 2h {ctx.flags}")


def _carry_out(
    request: RepairRequest,
    ctx: Context,
    change: ClusterChange,
    plan_input: PlanInput,
    limit: timedelta | None = None,
) -> int:
    """Show the plan; unless it is a dry run, confirm and apply it."""
    proposal = propose(ctx, plan_input)
    if request.dry_run:
        end = "Nothing was changed." if proposal.plan.changes else "Up to date."
        emit(request, f"{wrap(proposal.render())}\n{end}", proposal.as_dict())
        return 0
    # Anyone may use a kept image.
    found, sure = plan_input.found.without_image(), request.yes and request.is_named
    confirm_owner(ctx, found, sure=sure)
    check_busy_nodes(ctx, plan_input, proposal.plan)
    if proposal.plan.changes and ctx.cloud.billed:
        proposal = confirm_purchase(proposal, yes=request.yes)
    elif proposal.notes:
        say("\n".join(proposal.notes))

    def plan_again() -> Proposal:
        nonlocal proposal  # its deadline is the one to show
        given = prepare(ctx, change, request.ssh_cidr)
        if not given.found.alive:
            given = replace(given, record=given.record.begun(ctx.now()))
        proposal = propose(ctx, given)
        return proposal

    wait = CapacityWait(limit, plan_again) if limit else None
    cluster = apply_proposal(proposal, yes=request.yes, wait=wait)
    # An `extend` may have moved the end meanwhile.
    given = proposal.plan_input
    given = replace(given, record=given.record.joined(ctx.find_record()))
    proposal = replace(proposal, plan_input=given)
    emit(request, "\n".join(_render(cluster, proposal)), _as_dict(cluster, proposal))
    if has_terminal() and (offer := offer_once()):
        say(offer)
    return 0


def confirm_purchase(proposal: Proposal, *, yes: bool) -> Proposal:
    """Show a plan that costs money, and ask; return it as of now.

    Raises :class:`UsageError` if the answer is no.
    """
    say(proposal.render())
    proposal.require_quota()
    confirm("Continue?", yes=yes, about=proposal.spoken_price)
    proposal.ctx.events.record(
        "accepted",
        proposal.spoken_price,
        reason="--yes" if yes else "confirmed on the terminal",
    )
    return proposal.from_now()


def apply_proposal(
    proposal: Proposal,
    *,
    yes: bool,
    again: str = "up",
    before_image: BeforeImage = lambda _: None,
    wait: CapacityWait | None = None,
) -> Cluster:
    """Apply a proposal. After a failure, list what exists; the command ``again`` continues."""
    ctx, spec = proposal.ctx, proposal.plan_input.spec

    def bring(given: Proposal) -> Cluster:
        @functools.cache
        def offers() -> Sequence[Offer]:
            return given.offers or find_offers(ctx, given.plan_input)

        return bring_up(ctx, given.plan_input, given.plan, offers, report_new_plan, before_image)

    def report_new_plan(plan_input: PlanInput, plan: Plan, reason: str) -> None:
        check_busy_nodes(ctx, plan_input, plan)
        # A cluster that seemed up to date must not change without confirmation.
        if not proposal.plan.changes and ctx.cloud.billed and not yes:
            raise SprError(
                f"the cluster is degraded: {reason}; nothing was changed",
                hint=f"to repair it: spr-cluster repair --yes {ctx.flags}",
            )
        steps = ", ".join(action.kind.value.lower() for action in plan.actions)
        say(f"New plan ({reason}): {steps}")

    phase = ctx.progress.phase(
        f"Cluster {spec.name} of {counted(spec.nodes, 'node')}, {ctx.cloud.name} {ctx.cloud.region}"
    )
    with recording_failures(ctx, proposal.plan_input.now, again), phase:
        return bring_up_when_possible(proposal, wait, bring)


@contextlib.contextmanager
def recording_failures(ctx: Context, since: datetime, again: str) -> Iterator[None]:
    """Record what ends a command that buys, and list what exists; see :func:`list_what_exists`."""
    try:
        yield
    except (ForeignClusterError, ImageContentError) as failure:
        raise record_failure(ctx, failure) from None
    except BaseException as failure:
        list_what_exists(ctx, since, again)
        error = record_failure(ctx, failure)
        if isinstance(error, UsageError):
            # Exit code 2 would say that nothing was changed.
            error = SprError(error.message, hint=error.hint)
        raise error from None


def list_what_exists(ctx: Context, since: datetime, again: str = "up") -> None:
    """After a failure or Ctrl-C, print what exists, how to continue, and how to remove it.

    If EC2 does not answer, for example because credentials have expired, list what was bought ``since``
    the command began, from the event log.
    """
    cloud = ctx.cloud
    where = ctx.flags if again == "up" else f"--cloud {cloud.name} --region {cloud.region}"
    lines = [
        "",
        f"`{again.split()[0]}` did not finish.",
        f"To continue:           spr-cluster {again} {where}",
        f"To remove what exists: spr-cluster down {ctx.flags}",
    ]
    say("\n".join(lines))
    try:
        found = observe(ctx, ALL_KINDS, is_certain=False)
    except Exception as error:
        reason = translate_boto_error(error) or error
        text = f"What exists could not be listed: {describe_failure(reason)}. {_list_bought(ctx, since)}"
    else:
        text = (
            "EC2 shows nothing of it now. A machine bought in the last few seconds may not be listed "
            f"yet: in a minute, run `spr-cluster status {ctx.flags}`."
        )
        if found:
            cost = " and costs money" if cloud.billed and found.alive else ""
            text = f"It exists now{cost}: {found}"
    say(text)


def _list_bought(ctx: Context, since: datetime) -> str:
    ids = [id_ for event in ctx.events.bought(since) for id_ in event["resources"]]
    if not ids:
        return "This command bought no machines."
    cost = ", which cost money until they end" if ctx.cloud.billed else ""
    return f"This command bought {', '.join(ids)}{cost}."


def _as_dict(cluster: Cluster, proposal: Proposal) -> dict[str, Any]:
    cloud = proposal.ctx.cloud
    return {
        "cluster": cluster.name,
        "cloud": cloud.name,
        "region": cloud.region,
        "stack": cluster.stack,
        "changed": proposal.plan.changes,
        "expires": render_time(proposal.plan_input.record.expires),
        "latest": render_time(proposal.plan_input.record.latest),
        "usd_at_most": None if proposal.usd_at_most is None else round(proposal.usd_at_most, 2),
        "nodes": [node.as_dict() for node in cluster.nodes],
    }


def _render(cluster: Cluster, proposal: Proposal) -> Iterator[str]:
    for node in cluster.nodes:
        yield f"{node.name}  {node.instance.id}  {node.address}"
    if not proposal.plan.changes:
        yield f"Up to date: {counted(len(cluster.nodes), 'node')}, verified"
    name = "" if cluster.name == DEFAULT_NAME else f" --name {cluster.name}"
    ends = describe_lifetime(proposal.plan_input.record, proposal.ctx.now())
    runs = runs_tasks(load_stack(cluster.stack))
    # The full data set takes hours in containers on one machine.
    short = "" if proposal.ctx.cloud.billed else " --demo" if runs else " --smoke"
    task = f"train squad{'' if runs else ' --recipe reference'}{short}"
    yield wrap(f"Nodes shut down automatically {ends}. To extend: spr-cluster extend 2h{name}")
    yield wrap(f"Next: spr-cluster {task}{name}   (when done: spr-cluster down{name})")
