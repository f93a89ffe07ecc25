"""What the nodes see of one another: asked over the head, in one command, with deadlines everywhere."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from cluster.verify.network_agent import STAGES, START
from cluster.verify.node_probe import PYTHON
from infra.errors import HostError
from provision.host import Host

ALL_PAIRS_UP_TO = 16
_STAGE, _RESULT = "stage:", "links:"
_TITLES = {
    "reach": "names, ports and round trips between the nodes",
    "ssh": "SSH between the nodes",
    "send": "bandwidth between the nodes",
}
_END = "_END_OF_THE_PLAN_"
_DEADLINE_S = sum(STAGES.values()) + 30

Pairs = dict[str, list[str]]


@dataclass(frozen=True)
class Link:
    """The way from one node to another; ``None`` is what was not measured. Seconds and Gbit/s.

    ``error`` is why no connection came about, ``clock_s`` how far the other's clock is ahead.
    """

    source: str
    target: str
    address: str | None
    error: str | None = None
    round_trip_s: float | None = None
    clock_s: float | None = None
    clock_error_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The link for ``--json``."""
        return {
            "from": self.source,
            "to": self.target,
            "address": self.address,
            "error": self.error,
            "round_trip_us": self.round_trip_s and round(self.round_trip_s * 1e6, 1),
        }


@dataclass(frozen=True)
class Links:
    """All ways that were tried. ``silent`` nodes ended without an answer, by their reason.

    ``ssh`` has the error, or ``None``, by (from, to); ``gbit`` has a speed, or an error's text.
    """

    silent: Mapping[str, str]
    links: tuple[Link, ...]
    ssh: Mapping[tuple[str, str], str | None]
    gbit: Mapping[tuple[str, str], float | str]
    all_pairs: bool
    """Every node with every other; else each with the next ones in a ring, and with the head."""


def plan_peers(nodes: Sequence[str], *, bandwidth: bool) -> dict[str, Pairs]:
    """Who tries whom in each stage: all up to 16 nodes, else a ring, and the head with all."""
    others = {name: _after(nodes, rank) for rank, name in enumerate(nodes)}
    ring = {name: peers[:1] for name, peers in others.items()}
    reach, ssh = others, others
    if len(nodes) > ALL_PAIRS_UP_TO:
        head = nodes[0]
        star = {name: list(dict.fromkeys([*peers, head])) for name, peers in ring.items()}
        reach = {**star, head: others[head]}
        # The head has entered all of them to ask.
        ssh = ring
    return {"reach": reach, "ssh": ssh, **({"send": ring} if bandwidth else {})}


def _after(nodes: Sequence[str], rank: int) -> list[str]:
    """All other nodes from the next one on, so that not all begin with the same."""
    return [*nodes[rank + 1 :], *nodes[:rank]]


def links_command(nodes: Sequence[str], *, bandwidth: bool) -> str:
    """The command for the head; its standard input is the program, then the plan."""
    source = resources.files("cluster").joinpath("link_probe.py").read_bytes()
    plan = {
        "nodes": list(nodes),
        "python": PYTHON,
        "peers": plan_peers(nodes, bandwidth=bandwidth),
    }
    lines = [base64.b64encode(source).decode(), json.dumps(plan)]
    run = f"sh -c {shlex.quote(f'{PYTHON} -c {shlex.quote(START)}')}"
    feed = "\n".join([f"{run} <<'{_END}'", *lines, _END])
    return f"# asking the nodes about one another\n{feed}"


def ask_links(
    head: Host, nodes: Sequence[str], *, bandwidth: bool, tell: Callable[[str], None]
) -> Links:
    """Have the nodes try one another. Raises :class:`HostError` where the head itself fails."""

    def on_line(line: str) -> None:
        if line.startswith(_STAGE):
            tell(_TITLES[line.removeprefix(_STAGE)])

    command = links_command(nodes, bandwidth=bandwidth)
    done = head.run(command, timeout_s=_DEADLINE_S, check=False, on_line=on_line)
    result = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if not result:
        words = done.stderr.strip().splitlines()
        reason = words[-1] if words else f"ended with {done.exit_code}"
        raise HostError(head.name, f"asking the nodes about one another: {reason}")
    all_pairs = len(nodes) <= ALL_PAIRS_UP_TO
    return parse_links(json.loads(result[0].removeprefix(_RESULT)), all_pairs=all_pairs)


def parse_links(told: Mapping[str, Any], *, all_pairs: bool) -> Links:
    """The answer of :mod:`cluster.verify.network_agent` as a value."""
    return Links(
        silent=dict(told["silent"]),
        links=tuple(
            _parse_link(source, target, found)
            for source, peers in told.get("reach", {}).items()
            for target, found in peers.items()
        ),
        ssh={
            (source, target): found.get("error")
            for source, peers in told.get("ssh", {}).items()
            for target, found in peers.items()
        },
        gbit={
            (source, target): found.get("gbit", found.get("error"))
            for source, peers in told.get("send", {}).items()
            for target, found in peers.items()
        },
        all_pairs=all_pairs,
    )


def _parse_link(source: str, target: str, found: Mapping[str, Any]) -> Link:
    return Link(
        source=source,
        target=target,
        address=found["address"],
        error=found.get("error"),
        round_trip_s=found.get("round_trip"),
        clock_s=found.get("clock"),
        clock_error_s=found.get("shortest", 0.0) / 2,
    )
