"""Extension of a cluster's time to live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from cluster.context import Context
from cluster.lifecycle.prepare import time_is_over
from infra import tags
from infra.cluster_record import ClusterRecord, deadline_tags
from infra.errors import SprError, UsageError
from infra.instances import label_instances
from infra.inventory import Inventory, describe_inventory
from infra.spec import LONGEST_TTL
from infra.termination_schedule import ClusterGuard, is_guarded
from infra.words import spoken_time
from provision.run_on_nodes import on_all
from provision.user_data import extend_life


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
            # First: it must never end a machine before that machine's own guard.
            guard = ClusterGuard(ctx.clients, cluster, ctx.clock)
            guard.protect(ids, record.expires, moves=True)
        # The tags next: if they named an earlier time than the nodes, `gc` would remove a live cluster.
        label_instances(ctx.clients.ec2, [found.group.id], deadline_tags(record))
        label = {tags.EXPIRES: tags.render_time(record.expires)}
        label_instances(ctx.clients.ec2, ids, label)
        on_all("extending", hosts, lambda host: extend_life(host, record.expires), hint=hint)
    until = tags.render_time(record.expires)
    resources = [found.group.id, *ids]
    ctx.events.record("extended", f"until {until}", resources=resources, expires=until)
    return record
