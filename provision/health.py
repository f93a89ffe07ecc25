"""What a node should be asked to tell whether it is fit for jobs, and the answer as a value. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from provision.facts import AMX_FLAGS, Cpu, parse_cpu_list, parse_topology
from provision.install import STACK_FILE, VENV
from provision.stacks import Stack
from provision.stacks.versions import parse_requirement

_GRANTED = "granted"


@dataclass(frozen=True)
class NodeHealth:
    """A node as it describes itself; ``None`` is what it does not know.

    Memory is in KiB, the disk in bytes, ``time`` in seconds since 1970 by the node's own clock.
    ``cpus`` are those that the node's processes may use; ``logical_cpus`` counts all that it has.
    """

    hostname: str
    kernel: str
    python: str
    in_venv: bool
    mark: str | None
    versions: Mapping[str, str | None]
    modules: Mapping[str, str | None]
    model: str
    amx: frozenset[str]
    tile_data: str
    cpus: tuple[Cpu, ...]
    logical_cpus: int
    governors: tuple[str, ...]
    turbo: bool | None
    huge_pages: str | None
    clocksource: str | None
    clock_kept: bool | None
    tcmalloc: str | None
    tcmalloc_error: str | None
    disk_size: int
    disk_free: int
    disk_error: str | None
    memory_total: int
    memory_available: int
    own_addresses: tuple[str, ...]
    interfaces: Mapping[str, tuple[str, int]]
    """Name and MTU of an interface by its IPv4 address."""
    time: float

    @property
    def missing_amx(self) -> tuple[str, ...]:
        """What AMX lacks here: processor flags, else the kernel's permission; empty where it works."""
        flags = tuple(sorted(AMX_FLAGS - self.amx))
        if flags or self.tile_data == _GRANTED:
            return flags
        return (f"the kernel's permission ({self.tile_data})",)

    @property
    def cores(self) -> int:
        """Physical cores that processes may use."""
        return len({(cpu.socket, cpu.core) for cpu in self.cpus})

    @property
    def sockets(self) -> int:
        return len({cpu.socket for cpu in self.cpus})

    @property
    def numa_nodes(self) -> int:
        return len({cpu.node for cpu in self.cpus})


def render_question(stack: Stack) -> str:
    """The argument of :mod:`provision.health_probe` for a node that should have this stack."""
    found = [parse_requirement(text) for text in stack.python_packages]
    question = {
        "packages": [requirement.name for requirement in found if requirement],
        "modules": list(stack.versions),
        "mark": STACK_FILE,
        "venv": VENV,
    }
    return json.dumps(question)


def probe_source() -> str:
    """The program that answers; it is handed to Python's standard input on the node."""
    return resources.files("provision").joinpath("health_probe.py").read_text()


def parse_health(text: str) -> NodeHealth:
    """The answer as a value. Raises :class:`ValueError` where it is none."""
    try:
        return _from_answer(json.loads(text))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"not an answer: {error!r}") from None


def _from_answer(told: Mapping[str, Any]) -> NodeHealth:
    processor, power, network = told["processor"], told["power"], told["network"]
    disk, memory, tcmalloc = told["disk"], told["memory"], told["tcmalloc"]
    topology = parse_topology(processor["topology"])
    allowed = parse_cpu_list(processor["allowed"])
    return NodeHealth(
        hostname=network["hostname"],
        kernel=told["kernel"],
        python=told["python"],
        in_venv=bool(told["in_venv"]),
        mark=told["mark"],
        versions=dict(told["versions"]),
        modules=dict(told["modules"]),
        model=processor["model"],
        amx=frozenset(processor["amx"]),
        tile_data=processor["tile_data"],
        cpus=tuple(cpu for cpu in topology if cpu.cpu in allowed),
        logical_cpus=len(topology),
        governors=tuple(power["governors"]),
        turbo=power["turbo"],
        huge_pages=power["huge_pages"],
        clocksource=power["clocksource"],
        clock_kept=power["clock_kept"],
        tcmalloc=tcmalloc["path"],
        tcmalloc_error=tcmalloc["error"],
        disk_size=int(disk["size"]),
        disk_free=int(disk["free"]),
        disk_error=disk["error"],
        memory_total=int(memory["total"]),
        memory_available=int(memory["available"]),
        own_addresses=tuple(network["own_addresses"]),
        interfaces={a: (i["name"], int(i["mtu"])) for a, i in network["interfaces"].items()},
        time=float(told["time"]),
    )
