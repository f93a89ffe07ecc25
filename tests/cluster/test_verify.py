from __future__ import annotations

import pytest

from cluster.nodes import Cluster
from cluster.verify import parse_answers, require_amx, verify_cluster
from infra.errors import HostError, SprError
from provision.facts import parse_facts
from tests.cluster.test_mesh import NODES
from tests.fakes import AMX, FakeHost, facts_answer

CLUSTER = Cluster("bert", NODES)


def head(output: str) -> FakeHost:
    return FakeHost("node0", [("xargs", output)])


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


def test_a_silent_and_an_unreachable_node_are_named() -> None:
    text = f"answer:node0:0:{AMX} :a\nanswer:node2:255::Permission denied (publickey).\n"

    with pytest.raises(SprError, match=r"can't reach node1, node2 \(Permission denied"):
        verify_cluster(CLUSTER, head(text), amx_required=True)


def test_a_worker_without_amx_is_named() -> None:
    text = f"answer:node0:0:{AMX} :a\nanswer:node1:0:{AMX} :b\nanswer:node2:0:amx_tile :c\n"

    with pytest.raises(SprError, match="no AMX on node2"):
        verify_cluster(CLUSTER, head(text), amx_required=True)
    answers = verify_cluster(CLUSTER, head(text), amx_required=False)
    assert answers[2].missing_amx == ("amx_bf16", "amx_int8")


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
