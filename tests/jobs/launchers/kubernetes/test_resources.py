"""Objects of the API, parsed: quantities, ranks of pods, states."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.launchers.kubernetes.request import JOB_KINDS
from jobs.launchers.kubernetes.resources import parse_job, parse_pods, parse_quantity
from tests.jobs.launchers.kubernetes.rendering import rendered


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("62", 62),
        ("61500m", Decimal("61.5")),
        ("460Gi", 460 << 30),
        ("1.5Ki", 1536),
        ("2T", 2 * 10**12),
        ("3Pi", 3 << 50),
        ("much", None),
        ("1e", None),
        ("", None),
        (None, None),
    ],
)
def test_quantities(text: object, value: object) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_what_this_tool_renders_is_understood(kind: str) -> None:
    words = ("--kind", kind, "--ppn", "2", "--claim", "data", "--image", "me/spr:1")
    job = parse_job(JOB_KINDS[kind], rendered(*words).job, [])

    assert (job.name, job.nodes, job.node_ranks) == ("bert", 4, 2)
    assert (job.claim, job.image) == ("data", "me/spr:1")
    assert job.spec["securityContext"]["runAsNonRoot"] is True


def pod(name: str, created: str = "1", **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": name, "labels": labels, "creationTimestamp": created}}


def test_pods_are_in_the_order_of_their_ranks() -> None:
    def replica(kind: str, index: str) -> dict[str, Any]:
        prefix = "training.kubeflow.org/replica-"
        return pod(f"{kind}-{index}", **{f"{prefix}type": kind, f"{prefix}index": index})

    found = parse_pods([replica("worker", "1"), replica("worker", "0"), replica("master", "0")])
    assert [(each.index, each.name) for each in found] == [
        (0, "master-0"),
        (1, "worker-0"),
        (2, "worker-1"),
    ]

    index, part = (
        "batch.kubernetes.io/job-completion-index",
        "jobset.sigs.k8s.io/replicatedjob-name",
    )
    of_set = [
        pod("old", "1", **{index: "0", part: "node"}),
        pod("second", "1", **{index: "1", part: "node"}),
        pod("new", "2", **{index: "0", part: "node"}),
        pod("model", "1", **{index: "0", part: "model-initializer"}),
    ]
    assert [each.name for each in parse_pods(of_set)] == ["new", "old", "second"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.dictionaries(
        st.sampled_from(("metadata", "spec", "status", "trainer", "labels", "replicas", "Master")),
        inner,
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(("metadata", "spec", "status")), _JSON))
def test_any_object_is_read(found: dict[str, Any]) -> None:
    for kind in JOB_KINDS.values():
        assert parse_job(kind, found, [found]).state in ("queued", "deleting")
