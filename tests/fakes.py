"""Stand-ins for the two outsides: a machine over SSH, and time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.errors import HostError
from provision.host import LineSink, Result
from provision.install import stack_digest
from provision.stacks import Stack
from provision.stacks.versions import parse_requirement

AMX = "amx_bf16 amx_tile amx_int8"


def facts_answer(
    *,
    hostname: str = "ip-172-31-0-10",
    address: str = "172.31.0.10",
    flags: str = f"fpu avx512f {AMX}",
    topology: str = "0,0,0,0\n1,1,0,0",
    allowed: str = "0-1",
    interface: str = "ens5",
    iomp5: str = "",
    efa: str = "",
) -> str:
    """What a machine answers to the question for its facts."""
    lscpu = {
        "lscpu": [{"field": "Model name:", "data": "Xeon"}, {"field": "Flags:", "data": flags}]
    }
    addresses = [
        {"ifname": "lo", "addr_info": [{"local": "127.0.0.1"}]},
        {"ifname": interface, "addr_info": [{"local": address}]},
    ]
    parts = {
        "hostname": hostname,
        "kernel": "6.8.0",
        "lscpu": json.dumps(lscpu),
        "topology": f"# CPU,Core,Socket,Node\n{topology}",
        "allowed": f"Cpus_allowed_list:\t{allowed}",
        "memory": "MemTotal:       527951364 kB",
        "addresses": json.dumps(addresses),
        "tcmalloc": "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4",
        "iomp5": iomp5,
        "efa": efa,
        "host_key": "ssh-ed25519 AAAAC3Nz root@host",
    }
    return "".join(f"--- spr-cluster: {key}\n{text}\n" for key, text in parts.items())


_HYPERTHREADS = "".join(f"{cpu},{cpu % 32},0,0\n" for cpu in range(64))
_ANY_VERSIONS = ("2.3.0", "1.26.4")


def health_answer(
    stack: Stack,
    *,
    hostname: str = "ip-172-31-0-10",
    address: str = "172.31.0.10",
    time: float = 1_800_000_000.0,
    **parts: dict[str, Any],
) -> dict[str, Any]:
    """What a good r7iz.metal-16xl with a stack says of itself; ``parts`` change parts of it."""
    wanted = [r for r in map(parse_requirement, stack.python_packages) if r]
    good: dict[str, Any] = {
        "kernel": "6.8.0",
        "python": f"{stack.python}.3",
        "in_venv": True,
        "mark": stack_digest(stack),
        "versions": {
            r.name: r.pinned or next(v for v in _ANY_VERSIONS if r.accepts(v)) for r in wanted
        },
        "modules": stack.versions,
        "processor": {
            "model": "Xeon",
            "amx": AMX.split(),
            "tile_data": "granted",
            "topology": f"# CPU,Core,Socket,Node\n{_HYPERTHREADS}",
            "allowed": "0-63",
        },
        "power": {
            "governors": ["performance"],
            "turbo": True,
            "huge_pages": "madvise",
            "clocksource": "tsc",
            "clock_kept": True,
        },
        "tcmalloc": {"path": "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4", "error": None},
        "disk": {"size": 100 << 30, "free": 80 << 30, "error": None},
        "memory": {"total": 527951364, "available": 520000000},
        "network": {
            "hostname": hostname,
            "own_addresses": [address],
            "interfaces": {address: {"name": "ens5", "mtu": 9001}},
        },
        "time": time,
    }
    for name, changed in parts.items():
        good[name] = {**good[name], **changed} if isinstance(good[name], dict) else changed
    return good


@dataclass
class FakeHost:
    """A machine whose answers are scripted; a command that nobody expected fails the test."""

    name: str
    answers: list[tuple[str, str | Exception | Callable[[str], str]]]
    commands: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def run(
        self,
        command: str,
        *,
        timeout_s: float | None = 120,
        check: bool = True,
        on_line: LineSink | None = None,
    ) -> Result:
        self.commands.append(command)
        for pattern, answer in self.answers:
            if re.search(pattern, command):
                if isinstance(answer, Exception):
                    raise answer
                text = answer(command) if callable(answer) else answer
                for line in text.splitlines() if on_line else ():
                    assert on_line is not None
                    on_line(line)
                return Result(0, text, "")
        raise AssertionError(f"unexpected command on {self.name}: {command}")

    def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        self.files[path] = content

    def upload(self, source: Path, path: str) -> None:
        self.files[path] = source.read_bytes()

    def download(self, path: str, target: Path) -> None:
        if path not in self.files:
            raise HostError(self.name, f"there is no {path}")
        target.write_bytes(self.files[path])

    def close(self) -> None:
        return None

    def why_gone(self) -> str:
        return ""


@dataclass
class FakeClock:
    """Time that passes only when somebody sleeps."""

    seconds: float = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
