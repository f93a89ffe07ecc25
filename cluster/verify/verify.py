"""``verify``: all checks of a cluster, of single nodes and between them. Read-only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.job_queue import find_running_job
from cluster.nodes import Cluster, HostOpener, Node
from cluster.verify.launcher import check_launcher, probe_launcher
from cluster.verify.network import NetworkReport, check_network, probe_network
from cluster.verify.nodes import check_nodes, probe_directly, probe_nodes
from cluster.verify.queue import check_queue, probe_queue
from cluster.verify.results import (
    CLUSTER,
    CheckResult,
    Expected,
    NodeAnswer,
    Verdict,
    name_some,
    sort_results,
    worst,
)
from infra.errors import HostError, HostKeyError
from infra.progress import Progress
from infra.words import counted
from provision.host import Host, on_all


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

    While a job runs, bandwidth and mpirun are skipped. Raises :class:`HostError` if the head can't be
    reached.
    """
    head = open_host(cluster.head)
    job = find_running_job(head)
    with progress.phase(f"Inspect {counted(len(cluster.nodes), 'node')}"):
        answers = _probe(cluster, expected, open_host, progress)
    reached = [answer.node for answer in answers if answer.reached]
    network = None
    if len(reached) > 1:
        with progress.phase(f"Test the network between {len(reached)} nodes"):
            network = probe_network(
                head, reached, bandwidth=bandwidth and not job, note=progress.note
            )
    cold = [answer.node for answer in answers if answer.health and answer.health.reading_disk]
    with progress.phase("Start a rank on every node"):
        if cold:
            progress.note(f"{name_some(cold)}: a new disk, read for the first time, is slow")
        launched = _launch(head, cluster, reached, job, cold=bool(cold))
    results = [
        *_describe_cluster(cluster, expected),
        *_merge(
            check_nodes(answers, expected), _check_between(cluster, expected, reached, network)
        ),
    ]
    results = list(sort_results(results, expected.addresses))
    # A node that the head can't reach has failed already.
    queue = check_queue(probe_queue(head), reached, expected) if reached else []
    return VerifyReport((*results, *launched, *queue), network)


def _check_between(
    cluster: Cluster, expected: Expected, reached: Sequence[str], network: NetworkReport | None
) -> Sequence[CheckResult]:
    if network:
        addresses = {node: expected.addresses[node] for node in reached}
        return check_network(network, replace(expected, addresses=addresses))
    if len(cluster.nodes) == 1:
        return [CheckResult(CLUSTER, "pairs", Verdict.OK, "a single node has no peers")]
    return []


def _merge(own: Sequence[CheckResult], between: Sequence[CheckResult]) -> list[CheckResult]:
    """Merge the results; the network's clocks replace those over SSH, which are less precise."""
    clocks = {result.node for result in between if result.check == "clock"}
    kept = [result for result in own if result.check != "clock" or result.node not in clocks]
    return [*kept, *between]


def _probe(
    cluster: Cluster, expected: Expected, open_host: HostOpener, progress: Progress
) -> tuple[NodeAnswer, ...]:
    """Have the head probe all nodes; probe from here those that it can't reach.

    If nodes are missing or new, the names that the head knows may belong to other machines.
    """
    answers: dict[str, NodeAnswer] = {}
    if cluster.is_whole:
        found = probe_nodes(open_host(cluster.head), expected.stack)
        answers = {answer.node: answer for answer in found}
    silent = [n for n in cluster.nodes if n.name not in answers or not answers[n.name].reached]
    if silent:
        progress.note(f"probing {counted(len(silent), 'node')} from here: the head can't connect")

    def probe(node: Node) -> NodeAnswer:
        answer = answers.get(node.name)
        reason = answer.reason if answer else "the nodes are not connected"
        try:
            health = probe_directly(open_host(node), expected.stack)
        except HostKeyError:
            raise
        except HostError as error:
            own = error.message.removeprefix(f"[{node.name}] ")
            return NodeAnswer(node.name, False, reason=f"{reason}; nor can this machine: {own}")
        return NodeAnswer(node.name, False, health, f"{reason}; but this machine can")

    answers |= on_all("probing the nodes", silent, probe)
    return tuple(answers[node.name] for node in cluster.nodes)


def _launch(
    head: Host, cluster: Cluster, reached: Sequence[str], job: str | None, *, cold: bool
) -> list[CheckResult]:
    nodes = [node.name for node in cluster.nodes]
    unreached = [node for node in nodes if node not in reached]
    if job:
        found = f"not tested, nor the bandwidth: job {job} is running and affects latencies"
    elif unreached:
        found = f"not tested: the head can't connect to {name_some(unreached)}"
    else:
        return check_launcher(probe_launcher(head, nodes, cold=cold))
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
