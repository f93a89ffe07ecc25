"""The queue as squeue prints it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.slurm.job_queue import (
    QueuedJob,
    expand_nodes,
    find_running_job,
    parse_queue,
    summarize_queue,
)
from tests.fakes import FakeHost

_TEXT = """Welcome to Ubuntu
12|PENDING||Resources|a user's | job
7|RUNNING|node[0-2,7]|None|squad-20260731-142501-k3f
9|COMPLETING|node4|None|run-1
"""


def test_jobs_are_listed_in_their_order() -> None:
    first, second, last = parse_queue(_TEXT)
    nodes = ("node0", "node1", "node2", "node7")
    assert first == QueuedJob("7", "RUNNING", nodes, "None", "squad-20260731-142501-k3f")
    assert (second.nodes, second.is_waiting) == (("node4",), False)
    assert (last.name, last.reason, last.is_waiting) == ("a user's | job", "Resources", True)
    assert parse_queue("") == ()


def test_how_busy_the_queue_is() -> None:
    nodes = "| a banner |\nnode0|idle|0/8/0/8\nnode1|down*|0/0/8/8\n"
    host = FakeHost("node0", [("sinfo", nodes + _TEXT)])
    assert str(summarize_queue(host)) == "1 of 2 nodes (node1 is down), 2 jobs running, 1 waiting"
    shared = FakeHost("node0", [("sinfo", f"node0|mixed-|3/5/0/8\n{_TEXT}")])
    assert str(summarize_queue(shared)) == "1 of 1 node, 2 jobs running on 3 of 8 cores, 1 waiting"


def test_a_waiting_job_uses_no_node() -> None:
    host = FakeHost("node0", [("^echo; timeout 20 squeue ", _TEXT)])
    assert find_running_job(host) == "squad-20260731-142501-k3f"
    waiting = FakeHost("node0", [("^echo; timeout 20 squeue ", _TEXT.splitlines()[1] + "\n")])
    assert find_running_job(waiting) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node[0,3-4],head,x[7]", ["node0", "node3", "node4", "head", "x7"]),
        ("node[008-010]", ["node008", "node009", "node010"]),
    ],
)
def test_short_forms_are_expanded(text: str, names: list[str]) -> None:
    assert list(expand_nodes(text)) == names


_ODD = st.text(st.sampled_from("12R[,]-n²é\x00|"), max_size=6)


@given(st.lists(st.tuples(*[_ODD] * 5).map("|".join), max_size=3).map("\n".join))
@example("²|RUNNING|node0||x")
@example("1|RUNNING|node[²-x,1-,-]||x")
def test_odd_lines_of_squeue_are_no_jobs(text: str) -> None:
    for job in parse_queue(text):
        assert int(job.id) >= 0
        assert all(job.nodes)
