"""Speed and delay of a node's network interface, set through the kernel's traffic control."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from infra.errors import CloudError, UsageError

_INTERFACE = "eth0"
_TIMEOUT_S = 10
# A bucket of 2 ms lets the kernel forward large segments without splitting them.
_BURST_S, _LEAST_BURST = 0.002, 128 * 1024
_QUEUE = "50ms"


class LinkLimits(NamedTuple):
    """Limits for the packets that a node sends; 0 means no limit."""

    gbit_s: float = 0
    delay_ms: float = 0


def shape(pid: int, link: LinkLimits) -> None:
    """Apply limits to the container whose first process is ``pid``. Raises :class:`CloudError`."""
    inside = ["nsenter", "--net", "--target", str(pid)]
    # Fails harmlessly if there is nothing to delete.
    _run([*inside, "tc", "qdisc", "delete", "dev", _INTERFACE, "root"])
    for command in tc_commands(link, _INTERFACE):
        if trouble := _run([*inside, *command]):
            raise CloudError(f"can't limit a node's network: {trouble}", code="InternalError")


def tc_commands(link: LinkLimits, interface: str) -> list[list[str]]:
    """Return the commands that shape an interface: a delay, followed by a token bucket. Pure."""
    add = ["tc", "qdisc", "add", "dev", interface]
    commands, where = [], ["root"]
    if link.delay_ms:
        delay = ["netem", "delay", f"{link.delay_ms:g}ms", "limit", "100000"]
        commands.append([*add, *where, "handle", "1:", *delay])
        where = ["parent", "1:1"]
    if link.gbit_s:
        rate = round(link.gbit_s * 1e9)
        burst = max(_LEAST_BURST, round(rate / 8 * _BURST_S))
        bucket = ["tbf", "rate", f"{rate}bit", "burst", str(burst), "latency", _QUEUE]
        commands.append([*add, *where, *bucket])
    return commands


def require_shaping(link: LinkLimits) -> None:
    """Raise :class:`UsageError` if this kernel can't apply the limits; tries in a new network namespace."""
    trials = (
        ("gbit_s", "tbf", LinkLimits(link.gbit_s, 0)),
        ("delay_ms", "netem", LinkLimits(0, link.delay_ms)),
    )
    for key, kind, part in trials:
        for command in tc_commands(part, "lo"):
            if trouble := _run(["unshare", "--net", *command]):
                raise UsageError(
                    f"network.{key}: this machine's kernel does not support it: {trouble}",
                    hint=f"omit {key}, or load the kernel module sch_{kind}",
                )


def _run(command: Sequence[str]) -> str:
    """Run a command; return the error, or "" on success."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it failed"])[0]
