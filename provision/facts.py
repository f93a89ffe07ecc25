"""Machine facts and node health, as reported by :mod:`provision.on_node.facts`.

Jobs and the mesh need the facts; health adds software, settings, and free resources.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from infra.errors import UsageError
from infra.files import parse_as, parse_object
from provision.host import Host
from provision.install import STACK_FILE, VENV
from provision.on_node import facts
from provision.on_node.proc import parse_cpus
from provision.run_on_nodes import STACK_PYTHON, Program, query, send
from provision.stacks.stack import Stack, parse_requirement
from provision.user_data import WARM_UNIT

T = TypeVar("T", bound="HostFacts")
AMX_FLAGS = frozenset({"amx_bf16", "amx_tile", "amx_int8"})
_GRANTED = "granted"


@dataclass(frozen=True)
class Cpu:
    """One logical processor. ``node`` is its NUMA node."""

    cpu: int
    core: int
    socket: int
    node: int


@dataclass(frozen=True)
class HostFacts:
    """What a machine reports about itself. ``cpus`` are those that its processes may use."""

    hostname: str
    kernel: str
    model: str
    amx: frozenset[str]
    tile_data: str
    """``granted`` if the kernel lets a process use AMX registers, else an error name such as ``EINVAL``."""
    cpus: tuple[Cpu, ...]
    memory_total: int
    """KiB."""
    interfaces: Mapping[str, str]
    """Interface name by IPv4 address."""
    tcmalloc: str | None
    iomp5: str | None
    host_key: str

    @property
    def missing_amx(self) -> tuple[str, ...]:
        """What AMX is missing: processor flags, or the kernel's permission; empty if AMX works."""
        flags = tuple(sorted(AMX_FLAGS - self.amx))
        if flags or self.tile_data == _GRANTED:
            return flags
        return (f"the kernel's permission ({self.tile_data})",)

    @property
    def physical_cores(self) -> tuple[Cpu, ...]:
        """The lowest usable logical processor of each physical core."""
        first: dict[tuple[int, int], Cpu] = {}
        for cpu in sorted(self.cpus, key=lambda c: c.cpu):
            first.setdefault((cpu.socket, cpu.core), cpu)
        return tuple(first.values())

    @property
    def sockets(self) -> int:
        return len({cpu.socket for cpu in self.cpus})

    @property
    def cores_by_numa_node(self) -> tuple[tuple[Cpu, ...], ...]:
        """The physical cores of each NUMA node; the nodes of a socket (sub-NUMA) stay neighbors."""
        groups: dict[tuple[int, int], list[Cpu]] = {}
        for core in self.physical_cores:
            groups.setdefault((core.socket, core.node), []).append(core)
        return tuple(tuple(groups[place]) for place in sorted(groups))

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        return tuple(sorted({cpu.node for cpu in self.cpus}))


def describe(stack: Stack | None = None, commands: Iterable[str] = ()) -> Program:
    """Return a program that reports a machine's facts and, with a stack, the node's health.

    Health includes the output of the shell ``commands``.
    """
    question: dict[str, Any] = {"venv": VENV, "mark": STACK_FILE, "warm": WARM_UNIT}
    if stack is None:
        # The system's Python: the stack's may be missing or broken.
        return send(facts, json.dumps(question))
    found = [parse_requirement(text) for text in stack.python_packages]
    packages = [requirement.name for requirement in found if requirement]
    question |= {"packages": packages, "modules": list(stack.versions), "commands": list(commands)}
    return send(facts, json.dumps(question), python=STACK_PYTHON)


def gather_facts(host: Host) -> HostFacts:
    """Query a machine's facts in one command. Raises :class:`HostError`."""
    return query(host, "facts", describe(), parse_facts)


def parse_facts(text: str) -> HostFacts:
    """Parse the probe's answer. Raises :class:`ValueError`."""
    found = _parse(HostFacts, text)
    if not found.cpus:
        raise ValueError("lscpu shows no CPU that its processes may use")
    return found


def parse_health(text: str) -> NodeHealth:
    """Parse the probe's answer. Raises :class:`ValueError`."""
    return _parse(NodeHealth, text)


def _parse(kind: type[T], text: str) -> T:
    try:
        answer = parse_object(text, "answer")
        topology = parse_topology(answer.get("topology", ""))
        allowed = parse_cpus(answer.get("allowed", ""))
        answer["cpus"] = [vars(cpu) for cpu in topology if cpu.cpu in allowed]
        answer["logical_cpus"] = len(topology)
        return parse_as(kind, json.dumps(answer), "answer")
    except UsageError as error:
        raise ValueError(f"{error.message}: {text.strip()[:80]!r}") from None


def parse_topology(text: str) -> tuple[Cpu, ...]:
    """Parse ``lscpu --parse=CPU,Core,Socket,Node``; a blank NUMA node is node 0."""
    rows = [line.split(",") for line in text.splitlines() if line and not line.startswith("#")]
    return tuple(Cpu(*(int(cell or 0) for cell in row)) for row in rows)


@dataclass(frozen=True)
class NodeHealth(HostFacts):
    """What a node reports about itself; ``None`` means unknown.

    Memory is in KiB, the disk in bytes, ``time`` in seconds since 1970 by the node's own clock.
    """

    python: str
    in_venv: bool
    mark: str | None
    versions: Mapping[str, str | None]
    modules: Mapping[str, str | None]
    logical_cpus: int
    """Usable or not."""
    clock_kept: bool | None
    tcmalloc_error: str | None
    disk_size: int
    disk_free: int
    disk_error: str | None
    reading_disk: bool
    """Whether it is still reading its new disk for the first time, which is slow."""
    memory_available: int
    own_addresses: tuple[str, ...]
    mtus: Mapping[str, int]
    """MTU by IPv4 address."""
    said: Mapping[str, str]
    """Output by command, for the checks; "" if the command fails."""
    time: float
