"""What a machine is: one command that asks it, and pure parsers of the answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from infra.errors import HostError
from provision.host import Host
from provision.install import VENV

AMX_FLAGS = frozenset({"amx_bf16", "amx_tile", "amx_int8"})

_MARK = "--- spr-cluster: "
_QUESTIONS = {
    "hostname": "hostname",
    "kernel": "uname -r",
    "lscpu": "lscpu -J",
    "topology": "lscpu --parse=CPU,Core,Socket,Node",
    "allowed": "grep Cpus_allowed_list /proc/self/status",
    "memory": "grep MemTotal /proc/meminfo",
    "addresses": "ip -j -4 address show",
    "tcmalloc": "ls -1 /usr/lib/*/libtcmalloc.so.* /usr/lib/*/libtcmalloc_minimal.so.* 2>/dev/null || true",
    # As PyPI's intel-openmp leaves it.
    "iomp5": f"ls -1 {VENV}/lib/libiomp5.so 2>/dev/null || true",
    "efa": "grep -ls DRIVER=efa /sys/class/infiniband/*/device/uevent || true",
    "host_key": "cat /etc/ssh/ssh_host_ed25519_key.pub",
}
FACTS_COMMAND = "; ".join(f"echo '{_MARK}{key}'; {ask}" for key, ask in _QUESTIONS.items())


@dataclass(frozen=True)
class Cpu:
    """One logical processor. ``node`` is its NUMA node."""

    cpu: int
    core: int
    socket: int
    node: int


@dataclass(frozen=True)
class HostFacts:
    """A machine as it describes itself. ``cpus`` are those that it may use; memory in KiB."""

    hostname: str
    kernel: str
    model: str
    flags: frozenset[str]
    cpus: tuple[Cpu, ...]
    memory_kib: int
    interfaces: dict[str, str]
    """Interface name by IPv4 address."""
    tcmalloc: str | None
    host_key: str
    iomp5: str | None = None
    efa: bool = False
    """It has an Elastic Fabric Adapter, and the driver for it."""

    @property
    def missing_amx(self) -> tuple[str, ...]:
        """The AMX flags that the processor does not show; empty where AMX is there."""
        return tuple(sorted(AMX_FLAGS - self.flags))

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


def gather_facts(host: Host) -> HostFacts:
    """Ask a machine what it is, in one command."""
    answer = host.run(FACTS_COMMAND, timeout_s=60).stdout
    try:
        return parse_facts(answer)
    except (KeyError, ValueError, IndexError) as error:
        raise HostError(host.name, f"its facts could not be read: {error!r}") from error


def parse_facts(answer: str) -> HostFacts:
    """The answer to :data:`FACTS_COMMAND` as a value."""
    parts: dict[str, str] = {}
    for part in answer.split(_MARK)[1:]:
        key, _, text = part.partition("\n")
        parts[key.strip()] = text.strip()
    fields = parse_lscpu_json(parts["lscpu"])
    allowed = parse_cpu_list(parts["allowed"].split(":", 1)[1].strip())
    tcmalloc = sorted(parts["tcmalloc"].split(), key=lambda path: ("minimal" in path, path))
    return HostFacts(
        hostname=parts["hostname"],
        kernel=parts["kernel"],
        model=fields.get("Model name", "unknown"),
        flags=frozenset(fields.get("Flags", "").split()),
        cpus=tuple(cpu for cpu in parse_topology(parts["topology"]) if cpu.cpu in allowed),
        memory_kib=int(parts["memory"].split()[1]),
        interfaces=parse_addresses(parts["addresses"]),
        tcmalloc=tcmalloc[0] if tcmalloc else None,
        host_key=" ".join(parts["host_key"].split()[:2]),
        iomp5=parts["iomp5"] or None,
        efa=bool(parts["efa"]),
    )


def parse_lscpu_json(text: str) -> dict[str, str]:
    """``lscpu -J``'s fields by name; newer versions nest them under ``children``."""

    def walk(entries: Iterable[dict[str, Any]]) -> Iterable[tuple[str, str]]:
        for entry in entries:
            yield str(entry["field"]).rstrip(":"), str(entry.get("data") or "")
            yield from walk(entry.get("children", ()))

    return dict(walk(json.loads(text)["lscpu"]))


def parse_topology(text: str) -> tuple[Cpu, ...]:
    """``lscpu --parse=CPU,Core,Socket,Node``; a blank NUMA node is node 0."""
    rows = [line.split(",") for line in text.splitlines() if line and not line.startswith("#")]
    return tuple(Cpu(*(int(cell or 0) for cell in row)) for row in rows)


def parse_cpu_list(text: str) -> frozenset[int]:
    """The kernel's list format, such as ``0-3,8``."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        numbers.update(range(int(low), int(high or low) + 1))
    return frozenset(numbers)


def parse_addresses(text: str) -> dict[str, str]:
    """Interface name by IPv4 address, from ``ip -j -4 address show``."""
    return {
        address["local"]: interface["ifname"]
        for interface in json.loads(text)
        for address in interface.get("addr_info", ())
    }
