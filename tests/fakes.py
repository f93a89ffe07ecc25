"""Stand-ins for a machine over SSH and for time."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.verify import machine, reachability
from cluster.verify.results import CommandCheck
from cluster.verify.verify import NODE_CHECKS
from infra.errors import HostError
from jobs.worker.runtime.events import mark_of
from provision.host import Result, TextSink
from provision.install import stack_digest
from provision.stacks.stack import Stack, parse_requirement

EXPIRES = 1_900_000_000
"""When a healthy machine shuts itself down, in seconds since 1970."""
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
) -> str:
    """The probe's answer to the question for a machine's facts."""
    return json.dumps(
        {
            "kernel": "6.8.0",
            "model": "Xeon",
            "amx": [flag for flag in flags.split() if flag.startswith("amx_")],
            "tile_data": "granted",
            "topology": f"# CPU,Core,Socket,Node\n{topology}",
            "allowed": allowed,
            "memory_total": 527951364,
            "memory_available": 520000000,
            "hostname": hostname,
            "interfaces": {"127.0.0.1": "lo", address: interface},
            "mtus": {"127.0.0.1": 65536, address: 9001},
            "tcmalloc": "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4",
            "tcmalloc_error": None,
            "iomp5": iomp5 or None,
            "host_key": "ssh-ed25519 AAAAC3Nz",
        }
    )


_HYPERTHREADS = "\n".join(f"{cpu},{cpu % 32},0,0" for cpu in range(64))
_ANY_VERSIONS = ("2.3.0", "1.26.4", "1.41.0", "1.37.38", "2025.2")


def health_answer(
    stack: Stack,
    *,
    hostname: str = "ip-172-31-0-10",
    address: str = "172.31.0.10",
    time: float = 1_800_000_000.0,
    **parts: Any,
) -> dict[str, Any]:
    """The probe's answer about a healthy r7iz.metal-16xl with a stack; ``parts`` change parts of it."""
    needed = [r for r in map(parse_requirement, stack.python_packages) if r]
    good: dict[str, Any] = {
        **json.loads(
            facts_answer(hostname=hostname, address=address, topology=_HYPERTHREADS, allowed="0-63")
        ),
        "python": f"{stack.python}.3",
        "in_venv": True,
        "mark": stack_digest(stack),
        "versions": {
            r.name: r.pinned or next(v for v in _ANY_VERSIONS if r.accepts(v)) for r in needed
        },
        "modules": stack.versions,
        "said": {
            **{check.command: "" for check in NODE_CHECKS if isinstance(check, CommandCheck)},
            reachability.check_lifetime.command: f"{EXPIRES} {EXPIRES} 0",
            machine.check_governor.command: "performance",
            machine.check_turbo.command: "0",
            machine.check_huge_pages.command: "always [madvise] never",
            machine.check_clocksource.command: "tsc",
            machine.check_limits.command: "cpuset cpu io memory pids",
        },
        "clock_kept": True,
        "disk_size": 100 << 30,
        "disk_free": 80 << 30,
        "disk_error": None,
        "reading_disk": False,
        "own_addresses": [address],
        "time": time,
    }
    for name, changed in parts.items():
        is_part = name in ("said", "versions", "modules")
        good[name] = {**good[name], **changed} if is_part else changed
    return good


def marked(output: str, command: str) -> str:
    """What a job prints, with the mark of the job that a command is about."""
    found = re.search(r"spr-jobs/([\w.-]+)", command)
    return output.replace("@spr {", f"@spr {mark_of(found[1])} {{") if found else output


@dataclass
class FakeStream:
    """A command that has printed some lines and ended."""

    lines: list[str]
    sent: list[str] = field(default_factory=list)

    def send(self, text: str) -> None:
        self.sent.append(text)

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)

    def close(self) -> None:
        return None


class StandInHost:
    """A :class:`provision.host.Host` that is not one: a subclass answers commands, and may do more."""

    name: str

    def answer(self, command: str, timeout_s: float | None) -> Result:
        raise NotImplementedError

    def run(
        self,
        command: str,
        *,
        timeout_s: float | None = 120,
        check: bool = True,
        on_text: TextSink | None = None,
    ) -> Result:
        done = self.answer(command, timeout_s)
        if on_text:
            for line in (done.stdout + done.stderr).splitlines():
                on_text(line)
        if check and done.exit_code:
            text = f"ended with {done.exit_code}: {done.stdout}{done.stderr}"
            raise HostError(self.name, text)
        return done

    def open_stream(self, command: str) -> FakeStream:
        return FakeStream(self.run(command).stdout.splitlines())

    def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        raise NotImplementedError

    def upload(self, source: Path, path: str) -> None:
        self.put(source.read_bytes(), path)

    def download(self, command: str) -> Iterator[bytes]:
        raise NotImplementedError

    def close(self) -> None:
        return None

    def why_gone(self) -> str:
        return ""


def run_here(command: str, env: dict[str, str], timeout_s: float | None) -> Result:
    """Run a shell command on this machine."""
    done = subprocess.run(
        ["bash", "-c", command],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
        text=True,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@dataclass
class FakeHost(StandInHost):
    """A machine with scripted answers; an unexpected command fails the test."""

    name: str
    answers: list[tuple[str, str | Exception | Callable[[str], str]]]
    commands: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def answer(self, command: str, timeout_s: float | None) -> Result:
        self.commands.append(command)
        for pattern, answer in self.answers:
            if re.search(pattern, command):
                if isinstance(answer, Exception):
                    raise answer
                return Result(
                    0, marked(answer(command) if callable(answer) else answer, command), ""
                )
        raise AssertionError(f"unexpected command on {self.name}: {command}")

    def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        self.files[path] = content

    def download(self, command: str) -> Iterator[bytes]:
        """A job's files, which a test puts at ``results.tar``; no worker answers."""
        self.commands.append(command)
        if "ssh " in command:
            raise HostError(self.name, "ended with 255")
        yield self.files["results.tar"]


class FakeClock:
    """Time that passes only in ``sleep``."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
