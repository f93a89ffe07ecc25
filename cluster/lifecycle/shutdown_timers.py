"""The timers that shut nodes down, set again where they do not run or have another time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from cluster.context import Context
from cluster.nodes import Cluster, HostOpener, Node
from cluster.verify.reachability import check_lifetime
from cluster.verify.results import Expected, NodeAnswer, Verdict, name_some
from provision.host import on_all
from provision.user_data import extend_life


def reset_guards(
    ctx: Context,
    cluster: Cluster,
    answers: Sequence[NodeAnswer],
    expected: Expected,
    expires: datetime,
    open_host: HostOpener,
) -> tuple[NodeAnswer, ...]:
    """Set the timers that the answers show to be wrong, and return the answers with the right time.

    ``expires`` is for a node without a tag. Raises :class:`HostsError` naming the nodes whose timer
    can't be started.
    """
    wrong = {
        answer.node: expected.expires.get(answer.node, expires)
        for answer in answers
        if answer.health
        and check_lifetime(answer.node, answer.health, expected).verdict is Verdict.FAIL
    }
    if not wrong:
        return tuple(answers)

    def reset(node: Node) -> None:
        extend_life(open_host(node), wrong[node.name])

    nodes = [cluster.node(name) for name in wrong]
    on_all("setting the timer that shuts a node down", nodes, reset)
    ctx.progress.note(f"set the timer that shuts it down again: {name_some(list(wrong))}")
    ids = [node.instance.id for node in nodes]
    ctx.events.record("guarded", f"set the timer of {name_some(list(wrong))}", resources=ids)
    return tuple(_with_time(answer, wrong) for answer in answers)


def _with_time(answer: NodeAnswer, times: dict[str, datetime]) -> NodeAnswer:
    if answer.node not in times or answer.health is None:
        return answer
    expires = int(times[answer.node].timestamp())
    return replace(answer, health=replace(answer.health, expires=expires))
