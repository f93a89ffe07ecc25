"""Start the network agent on all nodes and read what they measured. One command, with deadlines."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.verify import network_agent
from cluster.verify.network_agent import STAGES, START
from cluster.verify.node_probe import PYTHON
from infra.errors import HostError
from provision.host import Host

ALL_PAIRS_UP_TO = 16
_STAGE, _RESULT = "stage:", "links:"
_TITLES = {
    "reach": "names, ports, and round trips between the nodes",
    "ssh": "SSH between the nodes",
    "send": "bandwidth between the nodes",
}
_END = "_END_OF_THE_PLAN_"
_DEADLINE_S = sum(STAGES.values()) + 30

Pairs = dict[str, list[str]]


@dataclass(frozen=True)
class NetworkLink:
    """What one node measured of another, in seconds; ``None`` was not measured.

    ``error`` is the reason why the connection failed, ``clock_s`` how far the target's clock is ahead.
    """

    source: str
    target: str
    address: str | None
    error: str | None = None
    round_trip_s: float | None = None
    clock_s: float | None = None
    clock_error_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the link for ``--json``."""
        return {
            "from": self.source,
            "to": self.target,
            "address": self.address,
            "error": self.error,
            "round_trip_us": self.round_trip_s and round(self.round_trip_s * 1e6, 1),
        }


@dataclass(frozen=True)
class NetworkReport:
    """Measurements between the nodes. ``silent``: nodes that did not answer, with the reason.

    ``ssh`` holds an error or ``None`` by (source, target), ``gbit`` a speed in Gbit/s or an error.
    """

    silent: Mapping[str, str]
    links: tuple[NetworkLink, ...]
    ssh: Mapping[tuple[str, str], str | None]
    gbit: Mapping[tuple[str, str], float | str]
    all_pairs: bool
    """All pairs were tested; otherwise each node with the next one in a ring and with the head."""


def plan_peers(nodes: Sequence[str], *, bandwidth: bool) -> dict[str, Pairs]:
    """Return the peers of each node by stage: all others for up to 16 nodes, else ring and head."""
    others = {name: [*nodes[rank + 1 :], *nodes[:rank]] for rank, name in enumerate(nodes)}
    ring = {name: peers[:1] for name, peers in others.items()}
    reach, ssh = others, others
    if len(nodes) > ALL_PAIRS_UP_TO:
        head = nodes[0]
        star = {name: list(dict.fromkeys([*peers, head])) for name, peers in ring.items()}
        reach = {**star, head: others[head]}
        # The head already logs in to all nodes to start the agents.
        ssh = ring
    return {"reach": reach, "ssh": ssh, **({"send": ring} if bandwidth else {})}


def network_command(nodes: Sequence[str], *, bandwidth: bool) -> str:
    """Return the command for the head; its standard input is the agent, then the plan."""
    source = Path(network_agent.__file__).read_bytes()
    plan = {
        "nodes": list(nodes),
        "python": PYTHON,
        "peers": plan_peers(nodes, bandwidth=bandwidth),
    }
    lines = [base64.b64encode(source).decode(), json.dumps(plan)]
    run = f"sh -c {shlex.quote(f'{PYTHON} -c {shlex.quote(START)}')}"
    feed = "\n".join([f"{run} <<'{_END}'", *lines, _END])
    return f"# testing the network between the nodes\n{feed}"


def probe_network(
    head: Host, nodes: Sequence[str], *, bandwidth: bool, note: Callable[[str], None]
) -> NetworkReport:
    """Have the nodes test the network between them. Raises :class:`HostError` if the head can't."""
    lines: list[str] = []

    def on_text(text: str) -> None:
        for line in text.split("\n"):
            if line.startswith(_STAGE):
                note(_TITLES[line.removeprefix(_STAGE)])
            else:
                lines.append(line)

    command = network_command(nodes, bandwidth=bandwidth)
    done = head.run(command, timeout_s=_DEADLINE_S, check=False, on_text=on_text)
    result = [at for at, line in enumerate(lines) if line.startswith(_RESULT)]
    if not result:
        reason = lines[-1] if lines else f"exit code {done.exit_code}"
        raise HostError(head.name, f"testing the network between the nodes: {reason}")
    all_pairs = len(nodes) <= ALL_PAIRS_UP_TO
    # A long line comes in pieces. Nothing follows the result.
    answer = "".join(lines[result[0] :]).removeprefix(_RESULT)
    return parse_report(json.loads(answer), all_pairs=all_pairs)


def parse_report(answer: Mapping[str, Any], *, all_pairs: bool) -> NetworkReport:
    """Parse the answer of :mod:`cluster.verify.network_agent`."""

    def pairs(stage: str) -> dict[tuple[str, str], Mapping[str, Any]]:
        by_source = answer.get(stage, {}).items()
        return {(s, t): found for s, targets in by_source for t, found in targets.items()}

    return NetworkReport(
        silent=dict(answer["silent"]),
        links=tuple(_parse_link(*pair, found) for pair, found in pairs("reach").items()),
        ssh={pair: found.get("error") for pair, found in pairs("ssh").items()},
        gbit={pair: found.get("gbit", found.get("error")) for pair, found in pairs("send").items()},
        all_pairs=all_pairs,
    )


def _parse_link(source: str, target: str, found: Mapping[str, Any]) -> NetworkLink:
    return NetworkLink(
        source=source,
        target=target,
        address=found["address"],
        error=found.get("error"),
        round_trip_s=found.get("round_trip"),
        clock_s=found.get("clock"),
        clock_error_s=found.get("shortest", 0.0) / 2,
    )
