"""The record of a job on Kubernetes, ``job.json`` beside its results, from what the cluster knows. Pure."""

from __future__ import annotations

import shlex
from datetime import datetime
from typing import Any

from jobs.launchers.kubernetes.problems import exit_code
from jobs.launchers.kubernetes.resources import JobView, as_int, dig, dig_list, parse_time

_STATES = ("running", "terminated")


def describe_record(job: JobView, context: str, namespace: str) -> dict[str, Any]:
    """Return the fields of :class:`jobs.launchers.record.JobRecord` that a job on Kubernetes has."""
    pods = [pod for index in range(job.nodes) if (pod := job.pod(index * job.node_ranks))]
    words = [[str(word) for word in job.container.get(key) or ()] for key in ("command", "args")]
    # With oneCCL, a shell runs torchrun.
    argv = [*words[0][-1:], *words[1]]
    return {
        "job": job.name,
        "kind": "squad",
        "cluster": context,
        "cloud": "kubernetes",
        "command": shlex.join(argv),
        "argv": argv,
        "nodes": [{"name": pod.node, "pod": pod.name} for pod in pods],
        "nnodes": job.nodes,
        "placement": _describe_placement(job),
        "stack": job.stack,
        "when": job.created.isoformat() if job.created else None,
        **(_describe_end(job) if job.is_over else {}),
        "more": {
            "kind": job.kind.name,
            "namespace": namespace,
            "image": job.image,
            "claim": job.claim,
        },
    }


def _describe_placement(job: JobView) -> dict[str, int]:
    env = {str(each.get("name")): each.get("value") for each in dig_list(job.container, "env")}
    return {
        "nproc_per_node": job.node_ranks,
        "omp_threads": as_int(env.get("OMP_NUM_THREADS")),
        "ccl_workers": as_int(env.get("CCL_WORKER_COUNT")),
    }


def _describe_end(job: JobView) -> dict[str, Any]:
    """Return how and when the job ended, as far as its pods still say so."""
    began, ended = find_times(job)
    codes = [code for pod in job.pods if (code := exit_code(pod)) is not None]
    return {
        "state": job.state,
        "ended": ended.isoformat() if ended else None,
        "seconds": (ended - began).total_seconds() if began and ended else None,
        "exit_code": next(filter(None, codes), 0 if codes else None),
    }


def find_times(job: JobView) -> tuple[datetime | None, datetime | None]:
    """Return when the first pod of a job began and the last one ended, as far as they still say so."""
    states = [
        dig(each, "state", name) for pod in job.pods for each in pod.statuses for name in _STATES
    ]
    began, ended = (
        [time for each in states if (time := parse_time(each.get(key)))]
        for key in ("startedAt", "finishedAt")
    )
    return min(began, default=None), max(ended, default=None)
