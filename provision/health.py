"""A node's health: its facts, software, settings, and free resources, by the same probe. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from provision import facts
from provision.facts import HostFacts, parse_topology, read_answer, read_facts
from provision.stacks.stack import Stack
from provision.stacks.versions import parse_requirement


@dataclass(frozen=True)
class NodeHealth(HostFacts):
    """A node as it describes itself; ``None`` is what it does not know.

    Memory is in KiB, the disk in bytes, ``time`` in seconds since 1970 by the node's own clock.
    """

    python: str
    in_venv: bool
    mark: str | None
    versions: Mapping[str, str | None]
    modules: Mapping[str, str | None]
    logical_cpus: int
    """All that it has, usable or not."""
    governors: tuple[str, ...]
    turbo: bool | None
    huge_pages: str | None
    clocksource: str | None
    clock_kept: bool | None
    tcmalloc_error: str | None
    disk_size: int
    disk_free: int
    disk_error: str | None
    reading_disk: bool
    """It still reads its new disk for the first time, which is slow."""
    memory_available: int
    own_addresses: tuple[str, ...]
    mtus: Mapping[str, int]
    """MTU by IPv4 address."""
    expires: int | None
    """When its timer shuts it down, in seconds since 1970; ``None`` if the timer does not run."""
    time: float


def render_question(stack: Stack) -> str:
    """The probe's argument for a node that should have this stack."""
    found = [parse_requirement(text) for text in stack.python_packages]
    names = [requirement.name for requirement in found if requirement]
    return facts.render_question(names, list(stack.versions))


def parse_health(text: str) -> NodeHealth:
    """Parse the probe's answer. Raises :class:`ValueError`."""
    answer = read_answer(text)
    shared = read_facts(answer)
    try:
        power, network = answer["power"], answer["network"]
        disk, memory = answer["disk"], answer["memory"]
        return NodeHealth(
            **shared,
            python=answer["python"],
            in_venv=bool(answer["in_venv"]),
            mark=answer["mark"],
            versions=dict(answer["versions"]),
            modules=dict(answer["modules"]),
            logical_cpus=len(parse_topology(answer["processor"]["topology"])),
            governors=tuple(power["governors"]),
            turbo=power["turbo"],
            huge_pages=power["huge_pages"],
            clocksource=power["clocksource"],
            clock_kept=power["clock_kept"],
            tcmalloc_error=answer["tcmalloc"]["error"],
            disk_size=int(disk["size"]),
            disk_free=int(disk["free"]),
            disk_error=disk["error"],
            reading_disk=bool(answer["reading_disk"]),
            memory_available=int(memory["available"]),
            own_addresses=tuple(network["own_addresses"]),
            mtus={a: int(found["mtu"]) for a, found in network["interfaces"].items()},
            expires=None if answer["expires"] is None else int(answer["expires"]),
            time=float(answer["time"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"incomplete answer: {error!r}") from None
