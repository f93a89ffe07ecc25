"""Slurm's configuration, as a golden file, and the key that no two connections share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.slurm import FOLDER, make_munge_key, render_slurm_conf, slurm_files
from provision.facts import HostFacts, parse_facts
from tests.cluster.test_ssh_mesh import HOSTNAMES, NODES
from tests.fakes import facts_answer
from tests.golden import check_golden

GOLDEN = Path(__file__).with_name("golden")
_HYPERTHREADS = "\n".join(f"{cpu},{cpu % 4},{cpu % 4 // 2},0" for cpu in range(8))


def facts_of(**processor: str) -> dict[str, HostFacts]:
    return {n: parse_facts(facts_answer(hostname=h, **processor)) for n, h in HOSTNAMES.items()}


def test_slurm_conf() -> None:
    facts = facts_of(topology=_HYPERTHREADS, allowed="0-7")
    check_golden(GOLDEN / "slurm.conf", render_slurm_conf("bert", NODES, facts))


@pytest.mark.parametrize(
    ("allowed", "shape"),
    [
        ("0-7", "CPUs=8 Sockets=2 CoresPerSocket=2 ThreadsPerCore=2"),
        ("0-3", "CPUs=4 Sockets=2 CoresPerSocket=2 ThreadsPerCore=1"),
        ("1", "CPUs=1 Sockets=1 CoresPerSocket=1 ThreadsPerCore=1"),
        # One core with both threads, and one with one: no shape that Slurm has words for.
        ("0,1,4", "CPUs=3"),
        ("0-2", "CPUs=3"),
    ],
)
def test_a_node_has_the_cpus_that_its_processes_may_use(allowed: str, shape: str) -> None:
    text = render_slurm_conf("bert", NODES, facts_of(topology=_HYPERTHREADS, allowed=allowed))
    assert f"NodeAddr=172.31.0.11 {shape} RealMemory=515577\n" in text


def test_the_head_runs_the_queue_under_its_own_name() -> None:
    facts = facts_of()
    facts["node0"] = replace(facts["node0"], hostname="head-of-mine")
    text = render_slurm_conf("bert", NODES, facts)
    assert "SlurmctldHost=head-of-mine(172.31.0.10)\n" in text
    assert "NodeName=node0 NodeHostname=head-of-mine NodeAddr=172.31.0.10 " in text


def test_every_connection_has_a_new_key() -> None:
    first, second = (slurm_files("bert", NODES, facts_of()) for _ in range(2))
    key = f"{FOLDER}/munge.key"
    assert first.pop(key) != second.pop(key)
    assert first == second
    assert len(make_munge_key()) == 1024
