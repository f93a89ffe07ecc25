"""Stand-ins for the two outsides: a machine over SSH, and time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from infra.errors import HostError
from provision.host import LineSink, Result

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


@dataclass
class FakeClock:
    """Time that passes only when somebody sleeps."""

    seconds: float = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
