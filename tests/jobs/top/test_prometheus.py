"""The exposition format, read by its grammar."""

from __future__ import annotations

import re

from jobs.top.prometheus import render_prometheus
from jobs.top.snapshot import Snapshot
from tests.jobs.top.samples import JOB, make_node, make_rank, make_snapshot

# https://prometheus.io/docs/instrumenting/exposition_formats/#text-format-details
_SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (\S+)')


def parse(snapshot: Snapshot) -> dict[str, dict[str, float]]:
    """Return the values by name and labels; every sample follows its help and type, once."""
    found: dict[str, dict[str, float]] = {}
    text = render_prometheus(snapshot)
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            found[line.split()[2]] = {}
            last = line.split()[2]
        elif line.startswith("# TYPE "):
            assert line == f"# TYPE {last} gauge"
        else:
            match = _SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == last
            assert (match[2] or "") not in found[last]
            found[last][match[2] or ""] = float(match[3])
    assert all(found.values())
    return found


def test_every_figure_of_the_view_is_there() -> None:
    slow = make_node(0, ranks=[make_rank(0), make_rank(1, own_seconds=0.9)])
    found = parse(make_snapshot([slow, {"name": "node1", "error": "no answer for 12 s"}]))

    mine = f'cluster="bert",node="node0",job="{JOB}",rank="1"'
    assert found["spr_cluster_cost_usd"] == {'cluster="bert"': 12.345}
    assert found["spr_cluster_ttl_seconds"] == {'cluster="bert"': 18720}
    assert list(found["spr_node_up"].values()) == [1, 0]
    assert found["spr_node_cpu_busy_ratio"]['cluster="bert",node="node0",group="rank 1"'] == 0.97
    assert list(found["spr_node_memory_bytes"].values()) == [512e9]
    assert found["spr_rank_straggler"][mine] == 1
    assert found["spr_rank_own_seconds_per_step"][mine] == 0.9
    assert found["spr_job_eta_seconds"] == {f'cluster="bert",job="{JOB}"': 720}
    assert found["spr_queue_jobs"] == {
        'cluster="bert",state="PENDING"': 1,
        'cluster="bert",state="RUNNING"': 1,
    }
    assert found["spr_queue_up"] == {'cluster="bert"': 1}


def test_what_is_not_known_is_left_out() -> None:
    rank = {"job": JOB, "rank": 0}
    node = make_node(0, ranks=[rank])
    known = parse(
        make_snapshot(
            [node], usd=None, ttl_left_s=None, jobs=[], queue=[], queued=0, queue_error="x"
        )
    )

    assert known["spr_queue_up"] == {'cluster="bert"': 0}
    assert "spr_rank_straggler" in known
    missing = {"spr_cluster_cost_usd", "spr_rank_step", "spr_job_step", "spr_cluster_ttl_seconds"}
    assert not missing & set(known)


def test_labels_are_escaped_and_unlisted_jobs_counted() -> None:
    found = parse(make_snapshot([{"name": 'a"b\\c\nd'}], cluster="", queued=40))

    assert list(found["spr_node_up"]) == ['node="a\\"b\\\\c\\nd"']
    assert found["spr_queue_jobs"]['state="PENDING"'] == 39
