"""Facts about a machine: its own answer to :mod:`provision.probe`, as far as jobs and the mesh need it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from infra.errors import HostError, UsageError
from infra.files import parse_object
from provision.host import Host
from provision.install import STACK_FILE, VENV
from provision.lifetime import SHOW_EXPIRY
from provision.user_data import WARM_UNIT

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
    """A machine as it describes itself. ``cpus`` are those that its processes may use."""

    hostname: str
    kernel: str
    model: str
    amx: frozenset[str]
    tile_data: str
    """``granted`` if the kernel lets a process use AMX's registers, else the name of its error."""
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
        """What AMX lacks here: processor flags, else the kernel's permission; empty if it works."""
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
    def numa_nodes(self) -> tuple[int, ...]:
        return tuple(sorted({cpu.node for cpu in self.cpus}))


def probe_source() -> str:
    """The program that answers; it runs on the machine with ``render_question`` as its argument."""
    return resources.files("provision").joinpath("probe.py").read_text()


def render_question(packages: Sequence[str] | None = None, modules: Sequence[str] = ()) -> str:
    """The probe's argument: facts alone, or with ``packages`` also the machine's health."""
    question: dict[str, Any] = {"venv": VENV, "mark": STACK_FILE}
    if packages is not None:
        question |= {"packages": list(packages), "modules": list(modules)}
        question |= {"timer": SHOW_EXPIRY, "warm": WARM_UNIT}
    return json.dumps(question)


def gather_facts(host: Host) -> HostFacts:
    """Query a machine for its facts, in one command. Raises :class:`HostError`."""
    # The system's Python: the stack's may not be there yet, or be broken.
    argv = ["python3", "-c", probe_source(), render_question()]
    answer = host.run(f"# querying the facts\n{shlex.join(argv)}").stdout
    try:
        return parse_facts(answer)
    except ValueError as error:
        raise HostError(host.name, f"its facts can't be read: {error}") from None


def parse_facts(text: str) -> HostFacts:
    """Parse the probe's answer. Raises :class:`ValueError`."""
    facts = HostFacts(**read_facts(read_answer(text)))
    if not facts.cpus:
        raise ValueError("lscpu shows no CPU that its processes may use")
    return facts


def read_answer(text: str) -> Mapping[str, Any]:
    """Parse the probe's JSON. Raises :class:`ValueError` with the text if it is none."""
    try:
        return parse_object(text, "facts")
    except UsageError:
        raise ValueError(f"unexpected answer {text.strip()[:80]!r}") from None


def read_facts(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`HostFacts`. Raises :class:`ValueError` if the answer lacks one."""
    try:
        processor, network = answer["processor"], answer["network"]
        allowed = parse_cpu_list(processor["allowed"])
        topology = parse_topology(processor["topology"])
        return {
            "hostname": network["hostname"],
            "kernel": answer["kernel"],
            "model": processor["model"],
            "amx": frozenset(processor["amx"]),
            "tile_data": processor["tile_data"],
            "cpus": tuple(cpu for cpu in topology if cpu.cpu in allowed),
            "memory_total": int(answer["memory"]["total"]),
            "interfaces": {a: found["name"] for a, found in network["interfaces"].items()},
            "tcmalloc": answer["tcmalloc"]["path"],
            "iomp5": answer["iomp5"],
            "host_key": " ".join((answer["host_key"] or "").split()[:2]),
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"incomplete answer: {error!r}") from None


def parse_topology(text: str) -> tuple[Cpu, ...]:
    """Parse ``lscpu --parse=CPU,Core,Socket,Node``; a blank NUMA node is node 0."""
    rows = [line.split(",") for line in text.splitlines() if line and not line.startswith("#")]
    return tuple(Cpu(*(int(cell or 0) for cell in row)) for row in rows)


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's list format, such as ``0-3,8``."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        numbers.update(range(int(low), int(high or low) + 1))
    return frozenset(numbers)
