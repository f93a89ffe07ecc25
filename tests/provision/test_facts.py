from __future__ import annotations

import json

import pytest

from infra.errors import HostError
from provision.facts import (
    Cpu,
    gather_facts,
    parse_cpu_list,
    parse_facts,
    parse_lscpu_json,
    parse_topology,
)
from tests.fakes import FakeHost, facts_answer


def test_flat_and_nested_lscpu() -> None:
    flat = {"lscpu": [{"field": "Flags:", "data": "amx_bf16"}]}
    nested = {"lscpu": [{"field": "Vendor ID:", "data": "x", "children": flat["lscpu"]}]}

    assert parse_lscpu_json(json.dumps(flat))["Flags"] == "amx_bf16"
    assert parse_lscpu_json(json.dumps(nested)) == {"Vendor ID": "x", "Flags": "amx_bf16"}


def test_a_blank_numa_node_is_node_0() -> None:
    assert parse_topology("# CPU,Core,Socket,Node\n4,2,1,\n") == (Cpu(4, 2, 1, 0),)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0", {0}), ("0-3", {0, 1, 2, 3}), ("0-1,8,10-11", {0, 1, 8, 10, 11}), ("", set())],
)
def test_cpu_lists(text: str, numbers: set[int]) -> None:
    assert parse_cpu_list(text) == numbers


def test_only_the_cores_that_may_be_used_count() -> None:
    topology = "0,0,0,0\n1,1,0,0\n2,0,0,0\n3,1,0,0"

    facts = parse_facts(facts_answer(topology=topology, allowed="1,3"))

    assert facts.physical_cores == (Cpu(1, 1, 0, 0),)
    assert facts.numa_nodes == (0,)


def test_hyper_threads_are_not_cores() -> None:
    topology = "\n".join(f"{cpu},{cpu % 4},{cpu % 4 // 2},{cpu % 4 // 2}" for cpu in range(8))

    facts = parse_facts(facts_answer(topology=topology, allowed="0-7"))

    assert [core.cpu for core in facts.physical_cores] == [0, 1, 2, 3]
    assert (facts.sockets, facts.numa_nodes) == (2, (0, 1))


def test_facts_of_a_machine() -> None:
    facts = gather_facts(FakeHost("node0", [("lscpu", facts_answer())]))

    assert facts.missing_amx == ()
    assert facts.interfaces["172.31.0.10"] == "ens5"
    assert facts.host_key == "ssh-ed25519 AAAAC3Nz"
    assert facts.tcmalloc == "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4"


def test_an_answer_that_makes_no_sense_names_the_host() -> None:
    with pytest.raises(HostError, match=r"\[node3\] its facts could not be read"):
        gather_facts(FakeHost("node3", [("lscpu", "bash: lscpu: command not found")]))


def test_what_is_not_there_is_none() -> None:
    facts = parse_facts(facts_answer())
    assert (facts.iomp5, facts.efa) == (None, False)
    found = parse_facts(facts_answer(iomp5="/venv/lib/libiomp5.so", efa="/sys/x/uevent"))
    assert (found.iomp5, found.efa) == ("/venv/lib/libiomp5.so", True)
