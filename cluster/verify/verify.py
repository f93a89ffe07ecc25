"""``verify``: all checks of a cluster, of single nodes and between them. Read-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from cluster.nodes import Cluster, HostOpener
from cluster.slurm.job_queue import find_running_job
from cluster.verify import machine, reachability, software
from cluster.verify.launcher import check_launcher
from cluster.verify.network import NetworkReport, check_network, probe_network
from cluster.verify.queue import check_queue
from cluster.verify.reachability import check_ssh, compare_clocks
from cluster.verify.results import (
    CLUSTER,
    CheckResult,
    CommandCheck,
    Expected,
    NodeAnswer,
    NodeCheck,
    Verdict,
    name_some,
    worst,
)
from infra.errors import ConnectionLostError, HostError, HostKeyError, NoAnswerError
from infra.wait import Progress
from infra.words import counted
from provision.facts import NodeHealth, describe, parse_health
from provision.host import Host
from provision.run_on_nodes import Program, on_each, query, query_all
from provision.stacks.stack import Stack

NODE_CHECKS: tuple[NodeCheck, ...] = (
    reachability.check_hostname,
    reachability.check_mtu,
    reachability.check_clock,
    reachability.check_lifetime,
    machine.check_amx,
    machine.check_cores,
    machine.check_kernel,
    machine.check_memory,
    machine.check_governor,
    machine.check_turbo,
    machine.check_huge_pages,
    machine.check_limits,
    machine.check_clocksource,
    machine.check_clock_service,
    software.check_tcmalloc,
    software.check_stack,
    software.check_disk,
    software.check_python,
)
"""The checks of single nodes, in the order in which they are shown."""
_MAX_SHOWN = 3
_NODE_DEADLINE_S = 60


@dataclass(frozen=True)
class VerifyReport:
    """The results in the order of the checks, and the measurements between the nodes, if any."""

    results: tuple[CheckResult, ...]
    network: NetworkReport | None

    @property
    def verdict(self) -> Verdict:
        return worst(self.results)


def verify_cluster(
    cluster: Cluster,
    expected: Expected,
    open_host: HostOpener,
    progress: Progress,
    *,
    bandwidth: bool = True,
) -> VerifyReport:
    """Check each node, the network between them, mpirun, and the queue.

    While a job may be running, bandwidth and mpirun are skipped. Raises :class:`HostError` if the head
    can't be reached.
    """
    head = open_host(cluster.head)
    expected = replace(expected, connected=cluster.is_whole)
    busy = _why_busy(head)
    with progress.phase(f"Inspect {counted(len(cluster.nodes), 'node')}"):
        answers = _probe(cluster, expected, open_host, progress)
    reached = [node for node, answer in answers.items() if answer.reached]
    network = None
    if len(reached) > 1:
        with progress.phase(f"Test the network between {len(reached)} nodes"):
            network = probe_network(
                head, reached, bandwidth=bandwidth and not busy, note=progress.note
            )
    cold = [node for node, answer in answers.items() if answer.value and answer.value.reading_disk]
    with progress.phase("Start a rank on every node"):
        if cold:
            progress.note(f"{name_some(cold)}: a new disk, read for the first time, is slow")
        launched = _launch(head, cluster, reached, busy, cold=bool(cold))
    clocks = network.clocks(cluster.head.name) if network else {}
    results = [
        *_describe_cluster(cluster, expected),
        *check_nodes(answers, expected, clocks),
        *_check_between(cluster, expected, reached, network),
    ]
    # A node that the head can't reach has failed already.
    queue = check_queue(head, reached, expected) if reached else []
    return VerifyReport((*results, *launched, *queue), network)


def _why_busy(head: Host) -> str:
    """Return why tests must not load the nodes, such as a running job; "" if they may."""
    try:
        job = find_running_job(head)
    except (ConnectionLostError, HostKeyError, NoAnswerError):
        raise
    except HostError:  # the check of the queue says why
        return "a job may be running"
    return f"job {job} is running and affects latencies" if job else ""


def check_nodes(
    answers: Mapping[str, NodeAnswer],
    expected: Expected,
    clocks: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> tuple[CheckResult, ...]:
    """Check every node by its own answer; ``up`` ends with this. Pure.

    Results are grouped by check, in node order. ``clocks`` are more precise than those of the answers.
    """
    found = ((node, answers.get(node)) for node in expected.addresses)
    peers = {node: answer.value for node, answer in found if answer and answer.value}
    expected = replace(expected, peers=peers, clocks={**compare_clocks(answers), **clocks})
    return (
        *(check_ssh(node, answers.get(node), expected) for node in expected.addresses),
        *(check(node, peers[node], expected) for check in NODE_CHECKS for node in peers),
    )


def summarize_problems(results: Sequence[CheckResult], expected: Expected) -> str:
    """Summarize the problems, with the command for details; empty if there are none."""
    # `up` reports missing AMX separately.
    wrong = [r for r in results if r.verdict in (Verdict.FAIL, Verdict.WARN) and r.check != "amx"]
    if not wrong:
        return ""
    wrong.sort(key=lambda result: result.verdict is not Verdict.FAIL)
    shown = "; ".join(f"{r.node}: {r.check}: {r.found}" for r in wrong[:_MAX_SHOWN])
    more = f"; and {len(wrong) - _MAX_SHOWN} more" if len(wrong) > _MAX_SHOWN else ""
    return f"; problems: {shown}{more} (details: {expected.command('verify')})"


def _check_between(
    cluster: Cluster, expected: Expected, reached: Sequence[str], network: NetworkReport | None
) -> Sequence[CheckResult]:
    if network:
        addresses = {node: expected.addresses[node] for node in reached}
        expected = replace(expected, addresses=addresses)
        return check_network(network, expected)
    if len(cluster.nodes) == 1:
        return [CheckResult(CLUSTER, "pairs", Verdict.OK, "a single node has no peers")]
    return []


def _describe_nodes(stack: Stack) -> Program:
    commands = [check.command for check in NODE_CHECKS if isinstance(check, CommandCheck)]
    return describe(stack, commands)


def probe_nodes(head: Host, stack: Stack) -> dict[str, NodeAnswer]:
    """Have the head collect the health of every node in its hostfile."""
    return query_all(head, "health", _describe_nodes(stack), parse_health, _NODE_DEADLINE_S)


def probe_directly(host: Host, stack: Stack) -> NodeHealth:
    """Probe one node's health from this machine. Raises :class:`HostError`."""
    return query(host, "health", _describe_nodes(stack), parse_health, _NODE_DEADLINE_S)


def _probe(
    cluster: Cluster, expected: Expected, open_host: HostOpener, progress: Progress
) -> dict[str, NodeAnswer]:
    """Have the head probe all nodes; probe from here those that it can't reach.

    If nodes are missing or new, the head's names may belong to other machines.
    """
    stack = expected.stack
    known = probe_nodes(open_host(cluster.head), stack) if expected.connected else {}
    silent = [n for n in cluster.nodes if n.name not in known or not known[n.name].reached]
    if silent:
        why = "the head can't connect" if expected.connected else "not all nodes are connected"
        progress.note(f"probing {counted(len(silent), 'node')} from here: {why}")
    own = on_each(silent, lambda node: probe_directly(open_host(node), stack))
    for node, answer in own.items():
        reason = known[node].reason if node in known else "the nodes are not connected"
        more = f"nor can this machine: {answer.reason}" if answer.error else "but this machine can"
        own[node] = replace(answer, reached=False, reason=f"{reason}; {more}")
    return {node.name: {**known, **own}[node.name] for node in cluster.nodes}


def _launch(
    head: Host, cluster: Cluster, reached: Sequence[str], busy: str, *, cold: bool
) -> list[CheckResult]:
    nodes = [node.name for node in cluster.nodes]
    unreached = [node for node in nodes if node not in reached]
    if busy:
        found = f"not tested, nor the bandwidth: {busy}"
    elif not cluster.is_whole:
        found = "not tested: the nodes are not all connected"
    elif unreached:
        found = f"not tested: the head can't connect to {name_some(unreached)}"
    else:
        return check_launcher(head, nodes, cold=cold)
    return [CheckResult(CLUSTER, "mpirun", Verdict.SKIPPED, found)]


def _describe_cluster(cluster: Cluster, expected: Expected) -> list[CheckResult]:
    """Check that all nodes run, and name the hardware that they are compared with."""
    found = f"{len(cluster.nodes)} of {cluster.wanted_nodes} running"
    if cluster.is_whole:
        nodes = CheckResult(CLUSTER, "nodes", Verdict.OK, f"{found} and connected")
    else:
        if len(cluster.nodes) == cluster.wanted_nodes:
            found = f"{found}, not all connected"
        remedy = f"Replace and connect nodes:\n{expected.command('repair')}"
        nodes = CheckResult(CLUSTER, "nodes", Verdict.FAIL, found, "all, connected", remedy)
    hardware = CheckResult(
        CLUSTER, "hardware", Verdict.SKIPPED, "containers on one machine, only compared"
    )
    if expected.machine is not None:
        found = f"compared with {expected.machine.name}"
        hardware = CheckResult(CLUSTER, "hardware", Verdict.OK, found)
    return [nodes, hardware]
