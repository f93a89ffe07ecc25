"""A cluster's deadline: extends it, and corrects the timers that shut nodes down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial

from cluster.context import Context
from cluster.lifecycle.prepare import time_is_over
from cluster.nodes import Cluster, HostOpener, Node
from cluster.verify.reachability import check_lifetime
from cluster.verify.results import Expected, NodeAnswer, Verdict, name_some
from infra.aws.clients import changing
from infra.ec2 import tags
from infra.ec2.cluster_record import ClusterRecord, deadline_tags, lifetime_tags
from infra.ec2.instances import label_instances
from infra.ec2.inventory import Inventory, find_group
from infra.ec2.key_pair import read_public
from infra.ec2.termination_schedule import ClusterGuard, is_guarded
from infra.errors import SprError, UsageError
from infra.plan.ownership import check_owner
from infra.spec import LONGEST_TTL
from infra.words import spoken_day, spoken_time
from provision.run_on_nodes import on_all
from provision.user_data import extend_life

_MOST_WRITES = 3


def reset_guards(
    ctx: Context,
    cluster: Cluster,
    answers: Mapping[str, NodeAnswer],
    expected: Expected,
    record: ClusterRecord,
    open_host: HostOpener,
) -> tuple[Mapping[str, NodeAnswer], Expected]:
    """Set the tags and timers that are wrong; return the answers and expectations as they are then.

    Another command may move the end beyond that in ``record`` at any time. Raises :class:`HostsError`
    naming the nodes whose timer can't be started.
    """
    while True:
        found = _look(ctx)
        record = record.joined(found.record)
        lifetime, labels = record.lifetime, lifetime_tags(record)
        expected = replace(expected, lifetimes=dict.fromkeys(expected.instances, lifetime))
        # Nodes that were bought with the end before.
        stale = [n.instance.id for n in cluster.nodes if labels.items() - n.instance.tags.items()]
        if stale:
            _move_guard(ctx, found, stale, record)
            label_instances(ctx.clients.ec2, stale, labels)
        wrong = [
            node
            for node, answer in answers.items()
            if answer.value and check_lifetime(node, answer.value, expected).verdict is Verdict.FAIL
        ]
        if not wrong:
            return answers, expected
        nodes = [cluster.node(name) for name in wrong]
        set_timer = partial(extend_life, lifetime=lifetime)
        on_all("setting the timer that shuts a node down", map(open_host, nodes), set_timer)
        ctx.progress.note(f"set the timer that shuts it down again: {name_some(wrong)}")
        ids = [node.instance.id for node in nodes]
        ctx.events.record("guarded", f"set the timer of {name_some(wrong)}", resources=ids)
        shown = {check_lifetime.command: " ".join(map(str, lifetime.seconds))}
        for node in wrong:
            health = answers[node].value
            assert health
            right = replace(answers[node], value=replace(health, said={**health.said, **shown}))
            answers = {**answers, node: right}


def extend(
    ctx: Context,
    more: timedelta,
    approve: Callable[[Inventory], object] = lambda _: None,
) -> ClusterRecord:
    """Extend a cluster's time to live, also in its grace period, if ``approve`` does not raise."""
    # The user may take long to answer.
    approve(_find(ctx)[1])
    nodes, found, old = _find(ctx)
    # In the grace period, the time is counted from now: the cluster takes jobs again.
    more += max(ctx.now() - old.expires, timedelta())
    expires = old.expires + more
    # A later end, to which a job with a limit has moved it, stays.
    record = replace(old, expires=expires, latest=expires + old.options["grace"])
    if record.expires - ctx.now() > LONGEST_TTL:
        raise UsageError(
            f"cluster {ctx.name!r} would live until {spoken_time(record.expires, ctx.now())}; "
            "the maximum is 30 days from now",
            hint=f"its nodes shut down at {spoken_time(old.expires, ctx.now())} now",
        )
    return _change(ctx, nodes, found, record)


def raise_latest(ctx: Context, latest: datetime) -> ClusterRecord:
    """Let jobs keep a cluster's nodes until ``latest``; its time to live stays. Never shortens it.

    Raises :class:`UsageError` if that is more than `up --max-time` or `--budget` allows.
    """
    nodes, found, old = _find(ctx)
    latest = latest.replace(microsecond=0)
    return old if latest <= old.latest else _change(ctx, nodes, found, replace(old, latest=latest))


def describe_lifetime(record: ClusterRecord, now: datetime) -> str:
    """Return when a cluster's nodes shut down, as text for messages."""
    text = f"at {spoken_time(record.expires, now)}"
    if record.is_over(now):
        return f"when all results are fetched; they wait for that {record.spoken_grace(now)}"
    if record.latest == record.expires:
        return text
    today = now.astimezone(timezone.utc).date()
    text += f", or up to {spoken_day(record.grace_ends, today)} while results wait for `fetch`"
    if record.latest > record.grace_ends:
        until = spoken_day(record.latest, today)
        text += f", or up to {until} while a job with --max-time or --budget runs"
    return text


def _look(ctx: Context) -> Inventory:
    return find_group(ctx.clients.ec2, ctx.name)


def _find(ctx: Context) -> tuple[Sequence[Node], Inventory, ClusterRecord]:
    """Return a cluster whose end may be moved: its nodes, group, and record."""
    nodes = ctx.find_cluster().nodes
    found = _look(ctx)
    if found.group is None or found.record is None:
        raise SprError(f"cluster {ctx.name!r} has no record", hint=f"spr-cluster up {ctx.flags}")
    if found.record.is_ended(ctx.now()):
        raise time_is_over(ctx, found.record, [node.instance for node in nodes])
    # The nodes would refuse an earlier cluster's key only after the tags have the new time.
    if key := read_public(ctx.files.key):
        own = Inventory(security_groups=(found.group,))
        check_owner(ctx.name, own, key, ctx.now(), ctx.flags)
    return nodes, found, found.record


def _change(
    ctx: Context, nodes: Sequence[Node], found: Inventory, record: ClusterRecord
) -> ClusterRecord:
    """Move a cluster's end in the second guard, the tags, and then on the nodes.

    Tags can't be locked: if another command writes the end before it has seen this one's, both write again.
    """
    is_extended = found.record is None or record.expires > found.record.expires
    with changing(
        f"the tags may have the new time, and the nodes still the old one: {_resume(ctx)}"
    ):
        for _ in range(_MOST_WRITES):
            record = _write_end(ctx, nodes, record, is_extended=is_extended)
            seen = _look(ctx).record
            if seen is None or seen.lifetime == record.lifetime:
                break
    ids = [node.instance.id for node in nodes]
    until, latest = tags.render_time(record.expires), tags.render_time(record.latest)
    resources = [found.group.id, *ids] if found.group else ids
    text = f"until {until if is_extended else latest}"
    ctx.events.record("extended", text, resources=resources, expires=until, latest=latest)
    return record


def _write_end(
    ctx: Context, nodes: Sequence[Node], record: ClusterRecord, *, is_extended: bool
) -> ClusterRecord:
    """Write a cluster's end once, but no earlier than what is recorded; return that of the second guard.

    For a job, only the latest end moves.
    """
    found = _look(ctx)
    group, seen = found.group, found.record
    if group is None or seen is None or seen.created != record.created:
        raise SprError(f"cluster {ctx.name!r} was removed in the meantime")
    # Its options and limit are those of the last `up`.
    record = replace(seen.joined(record), generation=seen.generation + 1)
    if record.bound and record.latest > record.bound:
        raise UsageError(
            f"the nodes could run until {spoken_time(record.latest, ctx.now())}, later than --max-time "
            f"or --budget allows: {spoken_time(record.bound, ctx.now())}",
            hint=f"a higher limit: spr-cluster up --max-time DURATION --budget USD {ctx.flags}",
        )
    open_host = ctx.host_opener()
    hosts = [open_host(node) for node in nodes]
    hint = (
        f"the tags have the new time, but some nodes still have the old one: {_resume(ctx)}; "
        f"`spr-cluster repair {ctx.flags}` replaces lost nodes"
    )
    end = record.expires if is_extended else record.latest
    with ctx.progress.phase(f"Extend until {spoken_time(end, ctx.now())}"):
        ids = [node.instance.id for node in nodes]
        # First: EC2's schedule must never end a machine before its own guard does.
        _move_guard(ctx, found, ids, record)
        # That takes seconds, in which another command may have moved the end further.
        seen = _look(ctx).record or record
        last = replace(seen.joined(record), generation=max(seen.generation, record.generation))
        # Then the tags: with a time before that of the nodes, `gc` would remove a live cluster.
        label_instances(ctx.clients.ec2, [group.id], deadline_tags(last))
        label_instances(ctx.clients.ec2, ids, lifetime_tags(last))
        on_all("extending", hosts, partial(extend_life, lifetime=last.lifetime), hint=hint)
    return record


def _resume(ctx: Context) -> str:
    return f"`spr-cluster extend 1m {ctx.flags}` sets it on all nodes"


def _move_guard(ctx: Context, found: Inventory, ids: list[str], record: ClusterRecord) -> None:
    if is_guarded(found):
        boundary = record.options["permissions_boundary"]
        guard = ClusterGuard(ctx.clients, ctx.name, ctx.clock, boundary)
        guard.protect(ids, record.latest, moves=True)
