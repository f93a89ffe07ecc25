"""The check of the queue: what Slurm says of its nodes, and the verdict on it."""

from __future__ import annotations

import pytest

from cluster.verify.queue import check_queue
from cluster.verify.results import CheckResult
from tests.cluster.verify.fleet import NODES, ON_AWS
from tests.fakes import FakeHost


def check(answer: str) -> list[CheckResult]:
    head = FakeHost("node0", [("asking the queue", answer)])
    return check_queue(head, NODES, ON_AWS)


def test_nodes_that_slurm_can_use_are_counted() -> None:
    (result,) = check("| a banner |\nnode0|idle|none\nnode1|allocated+|none\nnode2|mixed-|none\n")

    assert (result.node, result.check, result.verdict) == ("cluster", "queue", "ok")
    assert result.found == "3 nodes in Slurm: 1 idle, 1 allocated+, 1 mixed-"


@pytest.mark.parametrize(
    ("state", "found", "remedy"),
    [
        ("down*|Not responding", "down*: Not responding", "sudo systemctl restart munge slurmd"),
        ("idle*|none", "idle*", "sudo systemctl restart munge slurmd"),
        ("unknown|none", "unknown", "sudo systemctl restart munge slurmd"),
        (
            "drained|a|b: by hand",
            "drained: a|b: by hand",
            "sudo scontrol update nodename=node1 state=resume",
        ),
        ("draining|spot", "draining: spot", "sudo scontrol update nodename=node1 state=resume"),
        ("draining|spot: gone at 9", "draining: spot: gone at 9", "spr-cluster repair --name bert"),
        ("drained|disk: / has 1 MiB", "drained: disk: / has 1 MiB", "df -h ~ /"),
    ],
)
def test_a_node_that_slurm_does_not_use_fails_with_its_reason(
    state: str, found: str, remedy: str
) -> None:
    (result,) = check(f"node0|idle|none\nnode1|{state}\nnode2|idle|none\n")

    assert (result.node, result.verdict, result.found) == ("node1", "fail", found)
    assert remedy in result.remedy


def test_a_node_that_slurm_does_not_know_fails() -> None:
    (result,) = check("node0|idle|none\nnode2|idle|none\n")

    assert (result.node, result.verdict) == ("node1", "fail")
    assert result.found == "Slurm does not know it"
    assert result.remedy.endswith("\nspr-cluster repair --name bert")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("", "no answer within 4 s"),
        (
            "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n",
            "Unable to contact slurm controller (connect failure)",
        ),
        ("sh: 1: sinfo: not found\n", "sh: 1: sinfo: not found"),
    ],
)
def test_slurm_that_does_not_answer_fails_as_a_whole(answer: str, found: str) -> None:
    (result,) = check(answer)

    assert (result.node, result.verdict) == ("cluster", "fail")
    assert result.found == f"Slurm does not answer on the head: {found}"
    assert "restart munge slurmctld" in result.remedy
