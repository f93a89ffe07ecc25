"""The probe of single nodes: parsing the answers and finding unusable nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.nodes import Cluster
from cluster.verify.machine import require_amx
from cluster.verify.nodes import find_unusable, parse_answers, probe_nodes
from infra.errors import HostError
from provision.facts import parse_facts
from provision.stacks.load import load_stack
from tests.cluster.test_ssh_mesh import NODES
from tests.fakes import AMX, FakeHost, facts_answer, health_answer

CLUSTER = Cluster("bert", NODES, len(NODES))
STACK = load_stack("upstream")


def answer(node: str, *, before: float = 10.0, after: float = 12.0, **parts: Any) -> str:
    """A healthy node's answer, as the head forwards it."""
    result = json.dumps(health_answer(STACK, time=11.5, **parts))
    return f"answer:{node}:0:{before}:{after}:{result}\n"


def unusable(text: str, *, amx_required: bool = True) -> dict[str, str]:
    return find_unusable(CLUSTER, parse_answers(text), amx_required=amx_required)


def test_answers_are_parsed_in_rank_order() -> None:
    refused = "answer:node2:255:10.0:11.0:ssh: connect to host node2: no route\n"

    two, ten = parse_answers(f"{answer('node10')}noise\n{refused}")

    assert (two.node, two.reached, two.health) == ("node2", False, None)
    assert two.reason == "ssh: connect to host node2: no route"
    assert (ten.node, ten.reached, ten.reason) == ("node10", True, "")
    assert ten.health is not None
    assert len(ten.health.physical_cores) == 32
    # The node's time was 11.5 between 10 and 12 by the head's clock.
    assert (ten.clock_s, ten.clock_error_s) == (0.5, 1.0)


@pytest.mark.parametrize("code", [124, 137])
def test_a_node_that_hangs_has_another_reason_than_one_that_refuses(code: int) -> None:
    (late,) = parse_answers(f"answer:node1:{code}:10.0:70.0:\n")

    assert (late.reached, late.reason) == (False, "no answer within 60 s")


def test_a_node_without_a_working_python_counts_as_reached() -> None:
    (broken,) = parse_answers("answer:node1:127:10.0:11.0:sh: 1: exec: python3: not found\n")

    assert (broken.reached, broken.health) == (True, None)
    assert broken.reason == "sh: 1: exec: python3: not found"


def test_the_head_probes_all_nodes_of_its_hostfile_in_one_command() -> None:
    head = FakeHost("node0", [(r"xargs .* < ~/hosts", answer("node0"))])

    assert [answer.node for answer in probe_nodes(head, STACK)] == ["node0"]
    assert len(head.commands) == 1
    # Linux takes at most 128 KiB as one argument.
    assert len(head.commands[0]) < 32_000


def test_a_healthy_cluster_has_no_unusable_nodes() -> None:
    assert unusable("".join(answer(node.name) for node in NODES)) == {}


def test_silent_and_unreachable_nodes_are_named_with_their_reasons() -> None:
    text = answer("node0") + "answer:node2:255:1.0:2.0:Permission denied (publickey).\n"

    assert unusable(text) == {
        "node1": "the head got no answer",
        "node2": "the head can't connect over SSH: Permission denied (publickey).",
    }


def test_a_node_whose_probe_fails_is_named() -> None:
    text = answer("node0") + answer("node1") + "answer:node2:1:1.0:2.0:Segmentation fault\n"

    assert unusable(text) == {"node2": "the probe failed: Segmentation fault"}


def test_a_worker_without_amx_is_named_if_amx_is_required() -> None:
    lacking = answer("node2", processor={"amx": ["amx_tile"]})
    text = answer("node0") + answer("node1") + lacking

    assert unusable(text) == {"node2": "no AMX: lacks amx_bf16, amx_int8"}
    assert unusable(text, amx_required=False) == {}


def test_amx_that_the_kernel_does_not_grant_counts_as_missing() -> None:
    lying = answer("node2", processor={"tile_data": "EINVAL"})
    text = answer("node0") + answer("node1") + lying

    assert unusable(text) == {"node2": "no AMX: lacks the kernel's permission (EINVAL)"}


@pytest.mark.parametrize("flag", ["amx_bf16", "amx_tile", "amx_int8"])
def test_each_amx_flag_is_required(flag: str) -> None:
    facts = {"node0": parse_facts(facts_answer(flags=AMX.replace(flag, "")))}

    with pytest.raises(HostError, match=f"lacks {flag}"):
        require_amx(facts, required=True)
    assert "no AMX" in require_amx(facts, required=False)


def test_available_amx_is_reported() -> None:
    assert require_amx({"node0": parse_facts(facts_answer())}, required=True).startswith(
        "AMX available"
    )
