"""Programs that are sent to nodes, and work on many nodes at once."""

from __future__ import annotations

import ast
import json
import sys
from importlib.util import resolve_name
from types import ModuleType

import pytest

from infra.errors import HostError, HostKeyError, HostsError
from jobs.top import relay
from jobs.worker.supervisor import listing, log_reader
from provision.on_node import everywhere, facts, network, sampler
from provision.run_on_nodes import on_all, send
from tests.fakes import FakeHost


@pytest.mark.parametrize(
    "program", [everywhere, facts, network, sampler, relay, listing, log_reader]
)
def test_a_program_travels_with_what_it_imports_and_needs_only_python_3_8(
    program: ModuleType,
) -> None:
    sources: dict[str, str] = dict(json.loads(send(program).stdin))
    assert [*sources][-1] == program.__name__

    known = set(sys.stdlib_module_names)
    for name, source in sources.items():
        # Stack `reference` has Python 3.8 on its nodes.
        tree = ast.parse(source, feature_version=(3, 8))
        plain = [n for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names]
        assert {alias.name.partition(".")[0] for alias in plain} <= known
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = str(node.module)
                if node.level:
                    module = resolve_name("." * node.level + module, name.rpartition(".")[0])
                assert {module, module.partition(".")[0]} & known
        known.add(name)


def test_results_come_by_name_and_failures_carry_every_outcome() -> None:
    good = [FakeHost(f"node{n}", [("hostname", str(n))]) for n in range(3)]
    bad = [FakeHost(f"node{n}", [("", HostError(f"node{n}", f"broken {n}"))]) for n in (3, 4)]

    done = on_all("asking", good, lambda host: host.run("hostname").stdout)
    assert [*done.items()] == [(f"node{n}", str(n)) for n in range(3)]
    assert on_all("asking", list[FakeHost](), lambda host: host.name) == {}
    with pytest.raises(HostsError) as caught:
        on_all("checking", [*good, *bad], lambda host: host.run("hostname"))
    assert caught.value.outcomes == {"node3": "broken 3", "node4": "broken 4"}
    assert str(caught.value).startswith("checking failed on 2 of 5 nodes:\n  [node3] broken 3")
    # A changed host key outweighs every other failure.
    changed = HostKeyError("node1", "another key", hint="look into known_hosts")
    hosts = [bad[0], FakeHost("node1", [("", changed)])]
    with pytest.raises(HostKeyError) as key:
        on_all("asking", hosts, lambda host: host.run("true"), hint="something else")
    assert key.value is changed
