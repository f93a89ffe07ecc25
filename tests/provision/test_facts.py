from __future__ import annotations

import os
import socket
import subprocess

import pytest

from infra.errors import HostError
from provision.facts import Cpu, gather_facts, parse_facts
from tests.fakes import FakeHost, facts_answer


def test_cores_are_usable_and_no_hyper_threads_and_a_blank_numa_node_is_node_0() -> None:
    topology = "0,0,0,\n1,1,0,\n2,0,0,\n3,1,0,"
    facts = parse_facts(facts_answer(topology=topology, allowed="1,3"))
    assert (facts.physical_cores, facts.numa_nodes) == ((Cpu(1, 1, 0, 0),), (0,))

    topology = "\n".join(f"{cpu},{cpu % 4},{cpu % 4 // 2},{cpu % 4 // 2}" for cpu in range(8))
    facts = parse_facts(facts_answer(topology=topology, allowed="0-7"))
    assert [core.cpu for core in facts.physical_cores] == [0, 1, 2, 3]
    assert (facts.sockets, facts.numa_nodes) == (2, (0, 1))


def test_the_probe_describes_this_machine() -> None:
    def run(command: str) -> str:
        return subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=True
        ).stdout

    facts = gather_facts(FakeHost("node0", [("", run)]))

    assert {cpu.cpu for cpu in facts.cpus} == os.sched_getaffinity(0)
    assert (facts.hostname, facts.kernel) == (socket.gethostname(), os.uname().release)
    assert facts.interfaces["127.0.0.1"] == "lo"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("bash: python3: not found", "answer: not JSON: .*: 'bash: python3: not found'"),
        ("[]", r"answer: expected a JSON object: '\[\]'"),
        ('{"kernel": "6.8"}', "answer: hostname: Field required: "),
        (facts_answer(allowed="7"), "lscpu shows no CPU that its processes may use"),
    ],
)
def test_an_unusable_answer_names_the_host(answer: str, reason: str) -> None:
    with pytest.raises(HostError, match=rf"^\[node3\] its facts can't be read: {reason}"):
        gather_facts(FakeHost("node3", [("^# querying the facts", answer)]))
