"""What the head hears from the nodes, and what is wrong with which of them."""

from __future__ import annotations

import pytest

from cluster.nodes import Cluster
from cluster.verify import ask_nodes, find_faults, parse_answers, require_amx
from infra.errors import HostError
from provision.facts import parse_facts
from tests.cluster.test_mesh import NODES
from tests.fakes import AMX, FakeHost, facts_answer

CLUSTER = Cluster("bert", NODES, len(NODES))


def faults(text: str, *, amx_required: bool = True) -> dict[str, str]:
    return find_faults(CLUSTER, parse_answers(text), amx_required=amx_required)


def test_answers_are_read_in_the_order_of_the_nodes() -> None:
    text = (
        f"answer:node10:0:{AMX} :ip-10\nnoise\nanswer:node2:255::ssh: connect to host: no route\n"
    )

    two, ten = parse_answers(text)

    assert (two.node, two.reached, two.hostname) == (
        "node2",
        False,
        "ssh: connect to host: no route",
    )
    assert (ten.node, ten.reached, ten.missing_amx) == ("node10", True, ())


def test_the_head_asks_all_nodes_of_its_hostfile_in_one_command() -> None:
    head = FakeHost("node0", [(r"xargs .* < ~/hosts", f"answer:node0:0:{AMX} :a\n")])

    assert [answer.node for answer in ask_nodes(head)] == ["node0"]
    assert len(head.commands) == 1


def test_nothing_is_wrong_with_a_good_cluster() -> None:
    assert faults("".join(f"answer:{node.name}:0:{AMX} :a\n" for node in NODES)) == {}


def test_a_silent_and_an_unreachable_node_are_named_each_with_its_reason() -> None:
    text = f"answer:node0:0:{AMX} :a\nanswer:node2:255::Permission denied (publickey).\n"

    assert faults(text) == {
        "node1": "the head got no answer from it",
        "node2": "the head can't reach it over SSH: Permission denied (publickey).",
    }


def test_a_worker_without_amx_is_named_where_that_matters() -> None:
    text = f"answer:node0:0:{AMX} :a\nanswer:node1:0:{AMX} :b\nanswer:node2:0:amx_tile :c\n"

    assert faults(text) == {"node2": "no AMX: its processor lacks amx_bf16, amx_int8"}
    assert faults(text, amx_required=False) == {}


@pytest.mark.parametrize("flag", ["amx_bf16", "amx_tile", "amx_int8"])
def test_each_amx_flag_counts(flag: str) -> None:
    facts = {"node0": parse_facts(facts_answer(flags=AMX.replace(flag, "")))}

    with pytest.raises(HostError, match=f"lacks {flag}"):
        require_amx(facts, required=True)
    assert "no AMX" in require_amx(facts, required=False)


def test_amx_is_said_to_be_there_only_where_it_is() -> None:
    assert require_amx({"node0": parse_facts(facts_answer())}, required=True).startswith(
        "AMX is there"
    )
