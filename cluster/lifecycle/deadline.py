"""A cluster's deadline: extends it, and corrects the timers that shut nodes down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from cluster.context import Context
from cluster.lifecycle.prepare import time_is_over
from cluster.nodes import Cluster, HostOpener, Node
from cluster.verify.reachability import check_lifetime
from cluster.verify.results import Expected, NodeAnswer, Verdict, name_some
from infra.ec2 import tags
from infra.ec2.cluster_record import ClusterRecord, deadline_tags
from infra.ec2.instances import label_instances
from infra.ec2.inventory import Inventory, describe_inventory
from infra.ec2.termination_schedule import ClusterGuard, is_guarded
from infra.errors import SprError, UsageError
from infra.spec import LONGEST_TTL
from infra.words import spoken_time
from provision.run_on_nodes import on_all
from provision.user_data import extend_life


def reset_guards(
    ctx: Context,
    cluster: Cluster,
    answers: Mapping[str, NodeAnswer],
    expected: Expected,
    expires: datetime,
    open_host: HostOpener,
) -> dict[str, NodeAnswer]:
    """Set the timers that are wrong according to the answers; return the corrected answers.

    ``expires`` is for a node without a tag. Raises :class:`HostsError` naming the nodes whose timer
    can't be started.
    """
    wrong = {
        node: expected.expires.get(node, expires)
        for node, answer in answers.items()
        if answer.value and check_lifetime(node, answer.value, expected).verdict is Verdict.FAIL
    }
    if not wrong:
        return dict(answers)

    def reset(node: Node) -> None:
        extend_life(open_host(node), wrong[node.name])

    nodes = [cluster.node(name) for name in wrong]
    on_all("setting the timer that shuts a node down", nodes, reset)
    ctx.progress.note(f"set the timer that shuts it down again: {name_some(list(wrong))}")
    ids = [node.instance.id for node in nodes]
    ctx.events.record("guarded", f"set the timer of {name_some(list(wrong))}", resources=ids)
    return {**answers, **{node: _with_time(answers[node], time) for node, time in wrong.items()}}


def _with_time(answer: NodeAnswer, expires: datetime) -> NodeAnswer:
    assert answer.value
    said = {**answer.value.said, check_lifetime.command: str(int(expires.timestamp()))}
    return replace(answer, value=replace(answer.value, said=said))


def extend(
    ctx: Context,
    cluster: str,
    more: timedelta,
    approve: Callable[[Inventory], object] = lambda _: None,
) -> ClusterRecord:
    """Extend a cluster's time to live, in its tags and then on its nodes, if ``approve`` does not raise."""
    nodes = ctx.find_cluster().nodes
    found = describe_inventory(ctx.clients.ec2, cluster, ("security_groups",))
    if found.group is None or found.record is None:
        raise SprError(f"cluster {cluster!r} has no record", hint=f"spr-cluster up {ctx.flags}")
    approve(found)
    if found.record.is_over(ctx.now()):
        raise time_is_over(ctx, cluster)
    expires = found.record.expires + more
    record = replace(found.record, expires=expires, generation=found.record.generation + 1)
    if record.expires - ctx.now() > LONGEST_TTL:
        raise UsageError(
            f"cluster {cluster!r} would live until {spoken_time(record.expires, ctx.now())}; "
            "the maximum is 30 days from now",
            hint=f"its nodes shut down at {spoken_time(found.record.expires, ctx.now())} now",
        )
    open_host = ctx.host_opener()
    hosts = [open_host(node) for node in nodes]
    hint = (
        "the tags have the new time, but some nodes still have the old one: "
        f"`spr-cluster extend 1m {ctx.flags}` sets it on all nodes; "
        f"`spr-cluster repair {ctx.flags}` replaces lost nodes"
    )
    with ctx.progress.phase(f"Extend until {spoken_time(record.expires, ctx.now())}"):
        ids = [node.instance.id for node in nodes]
        if is_guarded(found):
            # First: EC2's schedule must never end a machine before its own guard does.
            guard = ClusterGuard(ctx.clients, cluster, ctx.clock)
            guard.protect(ids, record.expires, moves=True)
        # Then the tags: with a time before that of the nodes, `gc` would remove a live cluster.
        label_instances(ctx.clients.ec2, [found.group.id], deadline_tags(record))
        label = {tags.EXPIRES: tags.render_time(record.expires)}
        label_instances(ctx.clients.ec2, ids, label)
        on_all("extending", hosts, lambda host: extend_life(host, record.expires), hint=hint)
    until = tags.render_time(record.expires)
    resources = [found.group.id, *ids]
    ctx.events.record("extended", f"until {until}", resources=resources, expires=until)
    return record
