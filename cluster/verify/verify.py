"""``verify``: all checks of a cluster, node by node and between the nodes. It changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.nodes import Cluster, HostOpener, Node
from cluster.verify.checks import (
    CLUSTER,
    CheckResult,
    Expected,
    Verdict,
    check_nodes,
    order_results,
)
from cluster.verify.checks.network import check_links, describe_single
from cluster.verify.network_probe import Links, ask_links
from cluster.verify.node_probe import NodeAnswer, ask_directly, ask_nodes
from infra.errors import HostError, HostKeyError
from infra.progress import Progress
from provision.host import Host, on_all


@dataclass(frozen=True)
class Examination:
    """What was found: results in the order of the checks, and every way that was measured."""

    results: tuple[CheckResult, ...]
    links: Links | None
    unreached: tuple[str, ...]
    """Nodes that the head can't enter."""

    @property
    def verdict(self) -> Verdict:
        """The worst of all; what could not be judged does not count."""
        found = {result.verdict for result in self.results}
        return next(v for v in (Verdict.FAIL, Verdict.WARN, Verdict.OK) if v in found)

    def with_results(self, more: Sequence[CheckResult]) -> Examination:
        """The same, with what somebody else has found out."""
        return replace(self, results=(*self.results, *more))


def examine(
    cluster: Cluster,
    expected: Expected,
    open_host: HostOpener,
    progress: Progress,
    *,
    bandwidth: bool = True,
) -> Examination:
    """Ask all nodes what they are, then have them try one another.

    Raises :class:`HostError` where the head itself can't be asked.
    """
    head = open_host(cluster.head)
    with progress.phase(f"Ask {len(cluster.nodes)} nodes what they are"):
        answers = _ask(cluster, expected, open_host, progress)
    reached = [answer.node for answer in answers if answer.reached]
    unreached = tuple(node.name for node in cluster.nodes if node.name not in reached)
    between: Sequence[CheckResult] = ()
    links = None
    if len(reached) > 1:
        links = _try_links(head, reached, progress, bandwidth=bandwidth)
        between = check_links(links, replace(expected, addresses=_only(expected, reached)))
    elif len(cluster.nodes) == 1:
        between = [describe_single()]
    finer = {result.node for result in between if result.check == "clock"}
    own = [
        result
        for result in check_nodes(answers, expected)
        if result.check != "clock" or result.node not in finer
    ]
    results = [*_describe_cluster(cluster, expected), *own, *between]
    return Examination(order_results(results, expected), links, unreached)


def _only(expected: Expected, nodes: Sequence[str]) -> dict[str, str]:
    return {node: address for node, address in expected.addresses.items() if node in nodes}


def _try_links(head: Host, nodes: Sequence[str], progress: Progress, *, bandwidth: bool) -> Links:
    with progress.phase(f"Try the ways between {len(nodes)} nodes"):
        return ask_links(head, nodes, bandwidth=bandwidth, tell=progress.note)


def _ask(
    cluster: Cluster, expected: Expected, open_host: HostOpener, progress: Progress
) -> tuple[NodeAnswer, ...]:
    """The nodes' answers to the head; those that it can't enter are asked from here.

    Is it the machine, or the way between them? Where nodes are missing or new, the head knows the
    others by the names that they had.
    """
    if cluster.is_whole:
        heard = {
            answer.node: answer for answer in ask_nodes(open_host(cluster.head), expected.stack)
        }
    else:
        heard = {}
    silent = [node for node in cluster.nodes if not _is_reached(heard.get(node.name))]
    if silent:
        progress.note(f"asking {len(silent)} nodes from here, which the head can't enter")

    def ask(node: Node) -> NodeAnswer:
        answer = heard.get(node.name)
        reason = answer.reason if answer else "the nodes are not connected"
        try:
            health = ask_directly(open_host(node), expected.stack)
        except HostKeyError:
            raise
        except HostError as error:
            told = error.message.removeprefix(f"[{node.name}] ")
            return NodeAnswer(node.name, False, reason=f"{reason}; nor can this machine: {told}")
        return NodeAnswer(node.name, False, health, f"{reason}; but this machine can")

    heard |= on_all("asking the nodes", silent, ask)
    return tuple(heard[node.name] for node in cluster.nodes)


def _is_reached(answer: NodeAnswer | None) -> bool:
    return answer is not None and answer.reached


def _describe_cluster(cluster: Cluster, expected: Expected) -> list[CheckResult]:
    """Whether all nodes are there, and by what the machines are judged."""
    found = f"{len(cluster.nodes)} of {cluster.wanted_nodes} running"
    if cluster.is_whole:
        nodes = CheckResult(CLUSTER, "nodes", Verdict.OK, f"{found} and connected")
    else:
        missing = len(cluster.nodes) != cluster.wanted_nodes
        told = found if missing else f"{found}, not all connected"
        remedy = f"{expected.command('repair')} replaces and connects them"
        nodes = CheckResult(CLUSTER, "nodes", Verdict.FAIL, told, "all, connected", remedy)
    if expected.machine is None:
        told = "not judged: containers on one machine, compared with one another only"
        return [nodes, CheckResult(CLUSTER, "hardware", Verdict.UNKNOWN, told)]
    return [
        nodes,
        CheckResult(CLUSTER, "hardware", Verdict.OK, f"judged as {expected.machine.name}"),
    ]
