"""The snapshot as text: what is on the screen at every size, and what is left out; lines that are none."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from infra.errors import UsageError
from jobs.top.screen import render
from jobs.top.snapshot import SLOWER, Snapshot, parse_snapshot
from tests.golden import check_golden
from tests.harness.json_output import require_schema
from tests.jobs.top.samples import JOB, NOON, make_line, make_node, make_rank, make_snapshot


def make_troubled(count: int) -> Snapshot:
    """A cluster with a silent node and a straggler, both near its end."""
    nodes = [make_node(index) for index in range(count)]
    nodes[-1] = {"name": f"node{count - 1}", "error": "no answer for 12 s"}
    slow = [make_rank(2 * count - 4), make_rank(2 * count - 3, own_seconds=0.9)]
    nodes[-2] = make_node(count - 2, ranks=slow)
    return make_snapshot(nodes)


def lines_of(
    snapshot: Snapshot, width: int, height: int | None = None, notice: str = ""
) -> list[str]:
    return render(snapshot, width, height, notice).plain.split("\n")


@pytest.mark.parametrize(("nodes", "width", "height"), [(3, 80, 18), (64, 200, 13)])
def test_it_looks_right(nodes: int, width: int, height: int) -> None:
    lines = lines_of(make_troubled(nodes), width, height)

    name = f"{nodes}-nodes-{width}x{height}.txt"
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    check_golden(Path(__file__).parent / "golden" / name, text)


@pytest.mark.parametrize("nodes", [3, 64])
@pytest.mark.parametrize("width", [40, 80, 120, 161, 300])
@pytest.mark.parametrize("height", [8, 24, 33, 79, 120])
def test_it_fits_any_terminal_and_shows_or_counts_every_node(
    nodes: int, width: int, height: int
) -> None:
    lines = lines_of(make_troubled(nodes), width, height)

    assert len(lines) == height
    assert all(cell_len(line) <= width for line in lines)
    text = "\n".join(lines)
    shown = sum(f"node{index} " in text for index in range(nodes))
    counted = [int(line.split()[2]) for line in lines if "more node" in line]
    assert shown + sum(counted) == nodes
    assert "no answer for 12 s" in text
    slow = f"node{nodes - 2} "
    assert text.index(f"node{nodes - 1} ") < f"{text} {slow}".index(slow) or not counted


def test_a_long_queue_leaves_room_for_the_nodes() -> None:
    row = {"id": "1", "name": "x", "state": "PENDING", "passed": "0:00", "nodes": 1}
    queue = [{**row, "where": "", "reason": "Priority"} for _ in range(60)]
    lines = lines_of(make_snapshot(queue=queue, queued=500), 80, 24)

    assert sum(line.startswith("  rank ") for line in lines) == 6
    listed = sum("PENDING" in line for line in lines)
    assert f"… and {500 - listed} more jobs" in [line.strip() for line in lines]


STEP = {"job": "a", "phase": "train", "step": 1, "total": 9, "eta_seconds": 100, "age_s": 40}
PRICED = {**STEP, "usd_per_hour": 36.0, "began": NOON - 600, "budget": 20.0}
SMALL = {"metric": "mse", "score": 0.0012, "best_score": 0.0007, "best_step": 3}
NO_QUEUE = {"queue": [], "queued": 0}


@pytest.mark.parametrize(
    ("more", "line", "text"),
    [
        ({"usd_is_most": True}, 0, "  at most $12.35 so far  "),
        ({"jobs": []}, 1, "no job is running"),
        ({"jobs": [{"job": f"job-{n}"} for n in range(9)]}, 1, "job-0  starting"),
        ({"jobs": [{"job": f"job-{n}"} for n in range(9)]}, 3, "… and 7 more jobs"),
        ({"jobs": [PRICED]}, 1, "1 min 00 s left  $6.00 spent, $6.60 expected, $14.00 left"),
        ({"jobs": [{"job": "a", "phase": "running"}]}, 1, "a  running "),
        # From the log's last line on, also of a user's Trainer.
        ({"jobs": [STEP]}, 1, "step 1/9  1 min 00 s left "),
        ({"jobs": [{**STEP, "phase": "running"}]}, 1, "step 1/9  1 min 00 s left "),
        ({"jobs": [{**STEP, "phase": "evaluate"}]}, 1, "step 1/9  evaluate  "),
        ({"jobs": [STEP], "ttl_left_s": 59}, 1, "1 min 00 s left, but its nodes end sooner"),
        ({"jobs": [{"job": "a", **SMALL}]}, 1, "0.0012, best 0.0007 after step 3"),
        ({**NO_QUEUE, "queue_error": "it broke"}, -2, "QUEUE  not known: it broke "),
        (NO_QUEUE, -2, "QUEUE  empty"),
    ],
)
def test_a_line_says_what_is_known(more: dict[str, Any], line: int, text: str) -> None:
    assert text in lines_of(make_snapshot(**more), 100)[line]
    assert lines_of(make_snapshot(**more), 80, 24, "it is late")[-1].startswith("it is late")


def test_a_wide_screen_says_what_is_wrong_with_a_rank() -> None:
    ranks = [make_rank(0, age_s=150.0), make_rank(1), make_rank(2, own_seconds=0.9)]
    lines = lines_of(make_snapshot([make_node(0, ranks=ranks)]), 200, 50)
    notes = [line.partition(" ms")[2].strip() for line in lines if " ms" in line]
    wrong = "! rank 2 is slow", "no step for 2 min 30 s", "! slower than the others"
    assert [notes[place] for place in (0, 1, 3)] == [*wrong]


def test_text_from_elsewhere_can_not_move_the_cursor() -> None:
    row = {"id": "1\n2", "name": "a\x1b[2Jb", "state": "RUN\r", "passed": "\x07", "nodes": 1}
    queue = [{**row, "where": "\x1b[H", "reason": ""}]
    nodes = [{"name": "no\nde", "error": "\x1b]0;title\x07"}]
    text = render(make_snapshot(nodes, queue=queue, jobs=[{"job": "j\x1bk"}]), 80, 24).plain

    assert not [each for each in text if not each.isprintable() and each != "\n"]


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
    begins = make_snapshot([make_node(0, ranks=[{"job": JOB, "rank": 0}])], jobs=[{"job": JOB}])
    require_schema(["top"], json.loads(json.dumps(asdict(begins))))


@pytest.mark.parametrize(
    "changed", [{"name": 5}, {"memory": -1}, {"sent": 10**30}, {"busy": float("nan")}]
)
def test_a_line_that_is_no_snapshot_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"^x: nodes: 0: {next(iter(changed))}: "):
        parse_snapshot(make_line([make_node(0, **changed)]), "x")


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
