"""The answers of the nodes to the head, and which nodes jobs can't use."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from cluster.nodes import Cluster
from cluster.verify.machine import require_amx
from cluster.verify.reachability import compare_clocks, find_unusable, restore_names
from cluster.verify.results import NodeAnswer
from cluster.verify.verify import probe_nodes
from infra.errors import HostError
from provision.facts import parse_facts
from provision.stacks.load import load_stack
from tests.cluster.test_ssh_mesh import NODES
from tests.cluster.verify.fleet import ON_AWS
from tests.fakes import AMX, FakeHost, facts_answer, health_answer
from tests.provision.machine import Machine

CLUSTER = Cluster("bert", NODES, len(NODES))
STACK = load_stack("upstream")


def row(node: str, code: int | None, text: str) -> str:
    """A line that the head prints."""
    said = {"node": node, "code": code, "text": text, "began": 10.0, "ended": 12.0}
    return f"{json.dumps(said)}\n"


def answer(node: str, **parts: Any) -> str:
    """A healthy node's answer, as the head forwards it."""
    return row(node, 0, json.dumps(health_answer(STACK, time=11.5, **parts)))


def ask(text: str) -> dict[str, NodeAnswer]:
    head = FakeHost("node0", [("^# querying the health of all nodes", text)])
    found = probe_nodes(head, STACK)
    # Linux takes 128 KiB as one argument.
    assert [len(command) < 32_000 for command in head.commands] == [True]
    return found


def test_answers_and_refusals_are_parsed() -> None:
    refused = row("node2", 255, "ssh: connect to host node2: no route")

    answers = ask(f"{answer('node1')}noise\n{refused}")

    one, two = answers.values()
    assert (two.node, two.reached, two.value) == ("node2", False, None)
    assert two.reason == "ssh: connect to host node2: no route"
    assert (one.node, one.reached, one.reason) == ("node1", True, "")
    assert one.value is not None
    assert len(one.value.physical_cores) == 32
    # The node's time was 11.5 between 10 and 12 by the head's clock.
    assert compare_clocks(answers) == {"node1": (0.5, 1.0)}


@pytest.mark.parametrize(
    ("code", "text", "is_reached", "reason"),
    [
        (None, "", False, "no answer within 60 s"),
        # A node without a working Python.
        (127, "sh: 1: exec: python3: not found", True, "sh: 1: exec: python3: not found"),
    ],
)
def test_a_node_that_hangs_has_another_reason_than_one_that_fails(
    code: int | None, text: str, is_reached: bool, reason: str
) -> None:
    found = ask(row("node1", code, text))["node1"]

    assert (found.reached, found.value, found.reason) == (is_reached, None, reason)


REFUSED = "Permission denied (publickey)."


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([answer(node.name) for node in NODES], {}),
        (
            [answer("node0"), row("node2", 255, REFUSED)],
            {
                "node1": "the head got no answer",
                "node2": f"the head can't connect over SSH: {REFUSED}",
            },
        ),
        (
            [answer("node0"), answer("node1"), row("node2", 1, "Segmentation fault")],
            {"node2": "the probe failed: Segmentation fault"},
        ),
        (
            [answer("node0"), answer("node1"), answer("node2", amx=["amx_tile"])],
            {"node2": "no AMX: lacks amx_bf16, amx_int8"},
        ),
        (
            [answer("node0"), answer("node1", tile_data="EINVAL"), answer("node2")],
            {"node1": "no AMX: lacks the kernel's permission (EINVAL)"},
        ),
    ],
)
def test_nodes_to_replace_are_named_with_the_reason(
    answers: list[str], expected: dict[str, str]
) -> None:
    found = ask("".join(answers))
    assert find_unusable(CLUSTER, found, (), amx_required=True) == expected
    # A node that was there before may have jobs, without its probe.
    for earlier, amx, kept in (([], False, "AMX"), ([n.instance.id for n in NODES], True, "probe")):
        others = {node: why for node, why in expected.items() if kept not in why}
        assert find_unusable(CLUSTER, found, earlier, amx_required=amx) == others


def test_names_are_restored_once_and_before_a_loopback_address(tmp_path: Path) -> None:
    """Both nodes are one machine, whose part of the file is in the wrong place."""
    machine = Machine.make(tmp_path)
    block = "# spr-cluster begin\n10.0.0.5 node1 ip-10-0-0-5\n# spr-cluster end\n"
    rest = "127.0.0.1 localhost{0}\n127.0.1.1 ip-10-0-0-5.ec2.internal{0}\n10.0.0.50 ip-10-0-0-50\n"
    hosts = machine.path("/etc/hosts")
    hosts.write_text(rest.format("  ip-10-0-0-5") + block)
    machine.replace("hostname", "echo ip-10-0-0-5")
    machine.replace("ssh", 'exec sh -c "$2"')
    (script,) = shlex.split(restore_names("node1", ON_AWS).partition(" -- ")[2])
    for _ in range(2):
        done = machine.shell(script)
        assert (done.returncode, done.stderr) == (0, "")
        assert hosts.read_text() == block + rest.format("")


@pytest.mark.parametrize("flag", ["amx_bf16", "amx_tile", "amx_int8"])
def test_each_amx_flag_is_required(flag: str) -> None:
    facts = parse_facts(facts_answer(flags=AMX.replace(flag, "")))

    with pytest.raises(HostError, match=f"lacks {flag}"):
        require_amx("node0", facts, required=True)
    assert "no AMX" in require_amx("node0", facts, required=False)
    found = require_amx("node0", parse_facts(facts_answer()), required=True)
    assert found.startswith("AMX available")
