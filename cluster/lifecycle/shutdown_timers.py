"""The timers that shut nodes down, set again where they do not run or have another time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from cluster.context import Context
from cluster.nodes import Cluster, HostOpener, Node
from cluster.verify.reachability import check_lifetime
from cluster.verify.results import Expected, NodeAnswer, Verdict, name_some
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
    """Set the timers that the answers show to be wrong, and return the answers with the right time.

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
