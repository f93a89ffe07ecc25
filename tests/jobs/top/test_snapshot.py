"""Snapshots: stragglers, nodes as one rank, and lines that are no snapshots."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from infra.errors import UsageError
from jobs.top.queue_and_logs import CONNECTING
from jobs.top.snapshot import SLOWER, combine, parse_snapshot
from tests.harness.json_output import require_schema
from tests.jobs.top.samples import JOB, make_line, make_node, make_rank, make_snapshot


def stragglers(*own: float | None, jobs: str = "aaaaaaaaaa") -> list[int]:
    ranks = [make_rank(i, own_seconds=s, job=jobs[i]) for i, s in enumerate(own)]
    found = make_snapshot([make_node(0, ranks=ranks)])
    return [rank.rank for rank in found.ranks if rank.straggler]


def test_a_straggler_computes_longer_than_the_median_of_its_job() -> None:
    assert stragglers(1.0, 1.0, SLOWER + 0.01, 1.0) == [2]
    assert stragglers(1.0, 1.0, SLOWER - 0.01, 1.0) == []
    assert stragglers(1.0, 1.6) == [1]
    assert stragglers(5.0) == []
    assert stragglers(None, None) == []
    assert stragglers(1.0, None, 1.0, 2.0) == [3]
    assert stragglers(1.0, 1.0, 9.0, 9.0, 1.0, 9.9, jobs="aabbab") == []


def test_a_line_of_json_is_the_same_snapshot_again() -> None:
    found = make_snapshot([make_node(0, ranks=[make_rank(0), make_rank(1, own_seconds=0.9)])])

    line = json.dumps(asdict(found))
    assert parse_snapshot(line, "again") == found
    assert json.loads(line)["nodes"][0]["ranks"][1]["straggler"] is True
    job = {"job": JOB}
    begins = make_snapshot([make_node(0, ranks=[{**job, "rank": 0}])], jobs=[job])
    require_schema(["top"], json.loads(json.dumps(asdict(begins))))


def test_it_is_complete_when_nothing_is_waited_for() -> None:
    lost = {"name": "node1", "error": "no answer for 12 s"}
    assert make_snapshot([make_node(0), lost], queue_error="none").is_complete
    assert not make_snapshot([make_node(0), {"name": "node1", "error": CONNECTING}]).is_complete
    assert not make_snapshot(1, queue_error=CONNECTING).is_complete


@pytest.mark.parametrize(
    "changed", [{"name": 5}, {"memory": -1}, {"sent": 10**30}, {"busy": float("nan")}]
)
def test_a_line_that_is_no_snapshot_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^x: nodes: 0: {next(iter(changed))}: "):
        parse_snapshot(make_line([make_node(0, **changed)]), "x")


def test_a_nodes_ranks_are_one_by_the_slowest() -> None:
    ranks = [make_rank(0, step=9), make_rank(1, own_seconds=0.5, step=None)]
    one = combine(make_snapshot([make_node(0, ranks=ranks)]).ranks)
    assert (one.step, one.samples_per_second, one.own_seconds) == (9, 69.0, 0.5)
    assert one.communication == pytest.approx(0.12)
    assert combine(()).step is None


def test_the_cpus_of_ranks_count_by_their_number_and_belong_to_their_job() -> None:
    own: dict[str, Any] = {"name": "rank 0", "ranks": [0], "busy": 50}
    groups = [{**own, "job": "a", "cpus": "3", "count": 1}]
    groups += [{**own, "job": "b", "cpus": "7-9", "count": 3, "busy": 90}]
    ranks = [make_rank(0, job="a"), make_rank(0, job="b")]
    (node,) = make_snapshot([make_node(0, groups=groups, ranks=ranks)]).nodes
    assert (node.rank_busy, node.rest_busy) == (80.0, None)
    assert [group and group.cpus for group in map(node.group_of, node.ranks)] == ["3", "7-9"]
    (idle,) = make_snapshot([make_node(0, groups=[])]).nodes
    assert (idle.rank_busy, idle.rest_busy) == (50.2, None)
