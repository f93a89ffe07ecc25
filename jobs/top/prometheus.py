"""A snapshot in Prometheus's text exposition format, for a node exporter's textfile collector or a scrape.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jobs.top.snapshot import LiveNode, Snapshot

Labels = dict[str, str]
_HELP = {
    "spr_cluster_cost_usd": "Cost of the cluster's machines so far.",
    "spr_cluster_ttl_seconds": "Seconds until the nodes shut down.",
    "spr_node_up": "Whether the node answers.",
    "spr_node_cpu_busy_ratio": "Busy share of the CPUs with one use: a rank's, oneCCL's, or the rest.",
    "spr_node_memory_bytes": "Memory of the node.",
    "spr_node_memory_available_bytes": "Memory that a program could still get.",
    "spr_node_receive_bytes_per_second": "Bytes received from the network per second.",
    "spr_node_transmit_bytes_per_second": "Bytes sent to the network per second.",
    "spr_rank_step": "The rank's newest step.",
    "spr_rank_samples_per_second": "Samples per second of one rank.",
    "spr_rank_communication_ratio": "Share of its time that the rank waits for other ranks.",
    "spr_rank_own_seconds_per_step": "Seconds per step that the rank does not wait for others.",
    "spr_rank_straggler": "Whether the rank computes longer per step than the others.",
    "spr_job_step": "The job's newest step.",
    "spr_job_steps": "Steps that the job takes in all.",
    "spr_job_samples_per_second": "Samples per second of all ranks.",
    "spr_job_eta_seconds": "Seconds to the job's last step.",
    "spr_queue_up": "Whether the queue answers.",
    "spr_queue_jobs": "Jobs in the queue, by state.",
}


def render_prometheus(snapshot: Snapshot) -> str:
    """Return all known metrics, each with its help and type; all are gauges."""
    samples: dict[str, list[str]] = {name: [] for name in _HELP}
    shared = {"cluster": snapshot.cluster} if snapshot.cluster else {}
    for name, labels, value in _list_samples(snapshot):
        if value is not None:
            samples[name].append(_sample(name, {**shared, **labels}, float(value)))
    parts = []
    for name, lines in samples.items():
        if lines:
            parts += [f"# HELP {name} {_HELP[name]}", f"# TYPE {name} gauge", *lines]
    return "\n".join(parts) + "\n"


def _list_samples(snapshot: Snapshot) -> Iterator[tuple[str, Labels, float | None]]:
    yield "spr_cluster_cost_usd", {}, snapshot.usd
    yield "spr_cluster_ttl_seconds", {}, snapshot.ttl_left_s
    for node in snapshot.nodes:
        yield "spr_node_up", {"node": node.name}, not node.error
        if not node.error:
            yield from _list_node(node)
    for job in snapshot.jobs:
        labels = {"job": job.job}
        yield "spr_job_step", labels, job.step
        yield "spr_job_steps", labels, job.total
        yield "spr_job_samples_per_second", labels, job.samples_per_second
        yield "spr_job_eta_seconds", labels, job.left_s
    yield "spr_queue_up", {}, not snapshot.queue_error
    states = Counter(row.state for row in snapshot.queue)
    # A long list omits only waiting jobs.
    states["PENDING"] += max(0, snapshot.queued - len(snapshot.queue))
    for state, count in sorted(states.items()):
        yield "spr_queue_jobs", {"state": state}, count


def _list_node(node: LiveNode) -> Iterator[tuple[str, Labels, float | None]]:
    labels = {"node": node.name}
    for group in node.groups:
        yield "spr_node_cpu_busy_ratio", {**labels, "group": group.name}, group.busy / 100
    yield "spr_node_memory_bytes", labels, node.memory
    yield "spr_node_memory_available_bytes", labels, node.available
    yield "spr_node_receive_bytes_per_second", labels, node.received
    yield "spr_node_transmit_bytes_per_second", labels, node.sent
    for rank in node.ranks:
        mine = {**labels, "job": rank.job, "rank": str(rank.rank)}
        yield "spr_rank_step", mine, rank.step
        yield "spr_rank_samples_per_second", mine, rank.samples_per_second
        yield "spr_rank_communication_ratio", mine, rank.communication
        yield "spr_rank_own_seconds_per_step", mine, rank.own_seconds
        yield "spr_rank_straggler", mine, rank.straggler


def _sample(name: str, labels: Labels, value: float) -> str:
    quoted = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
    return f"{name}{{{quoted}}} {value:.10g}" if quoted else f"{name} {value:.10g}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
