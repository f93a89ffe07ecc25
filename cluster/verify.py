"""Is the cluster what it should be? AMX on every node, and every node reachable from the head."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.nodes import Cluster
from infra.errors import HostError
from provision.facts import AMX_FLAGS, HostFacts
from provision.host import Host

_ANSWER = "answer:"
# From the head to all nodes at once; a node that does not answer in time is named, not waited for.
_ASK_ALL = (
    "xargs -P 64 -I@ sh -c "
    + shlex.quote(
        "out=$(ssh -o ConnectTimeout=20 @ 'hostname; lscpu' 2>&1) "
        "&& flags=$(echo \"$out\" | grep -o 'amx_[a-z0-9]*' | sort -u | tr '\\n' ' '); "
        'echo "answer:@:$?:$flags:$(echo "$out" | head -n 1)"'
    )
    + " < ~/hosts"
)


@dataclass(frozen=True)
class NodeAnswer:
    """What the head heard from one node over node-to-node SSH."""

    node: str
    reached: bool
    hostname: str
    missing_amx: tuple[str, ...]


def require_amx(facts: Mapping[str, HostFacts], *, required: bool) -> str:
    """Check AMX before time is spent on anything else; returns what to tell the user.

    Raises :class:`HostError` where it is required and missing.
    """
    lacking = {name: fact for name, fact in facts.items() if fact.missing_amx}
    if not lacking:
        return "AMX is there: " + ", ".join(sorted(AMX_FLAGS))
    name, fact = next(iter(lacking.items()))
    text = f"no AMX: {fact.model} lacks {', '.join(fact.missing_amx)}"
    if required:
        raise HostError(
            name,
            text,
            hint="choose a type with AMX (--instance-type r7iz.metal-16xl), "
            "or go on without it: --allow-no-amx",
        )
    return f"{text}; going on without it, training will be slower"


def parse_answers(text: str) -> tuple[NodeAnswer, ...]:
    """The output of the question that the head asks every node."""
    answers = []
    for line in text.splitlines():
        if not line.startswith(_ANSWER):
            continue
        node, status, flags, first = line.removeprefix(_ANSWER).split(":", 3)
        missing = tuple(sorted(AMX_FLAGS - set(flags.split())))
        answers.append(NodeAnswer(node, status == "0", first, missing))
    return tuple(sorted(answers, key=lambda a: int(a.node.removeprefix("node"))))


def ask_nodes(head: Host) -> tuple[NodeAnswer, ...]:
    """Have the head ask every node of its hostfile, without a password."""
    return parse_answers(head.run(_ASK_ALL, timeout_s=180).stdout)


def find_faults(
    cluster: Cluster, answers: Sequence[NodeAnswer], *, amx_required: bool
) -> dict[str, str]:
    """What is wrong with which node, by its name; empty for a good cluster."""
    heard = {answer.node: answer for answer in answers}
    faults = {}
    for node in cluster.nodes:
        answer = heard.get(node.name)
        if answer is None:
            faults[node.name] = "the head got no answer from it"
        elif not answer.reached:
            faults[node.name] = f"the head can't reach it over SSH: {answer.hostname}"
        elif answer.missing_amx and amx_required:
            faults[node.name] = f"no AMX: its processor lacks {', '.join(answer.missing_amx)}"
    return faults
