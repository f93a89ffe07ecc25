"""Is the cluster what it should be? The head asks every node over the way that jobs go."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.nodes import Cluster
from infra.errors import HostError
from provision.facts import AMX_FLAGS, HostFacts
from provision.health import NodeHealth, parse_health, probe_source, render_question
from provision.host import Host
from provision.install import VENV
from provision.stacks import Stack

_ANSWER = "answer:"
_END = "_END_OF_THE_PROBE_"
_NODE_DEADLINE_S = 60
_ASK_DEADLINE_S = 5 * 60
# From the head to all nodes at once; a node that does not answer in time is named, not waited for.
# Where the environment of the stack is gone, the system's own Python can still tell the rest. Each
# answer goes to a file of its own in memory: in one pipe they could mix, and a disk could be full.
_ASK_ALL = f"""# asking every node what it is
folder=$(mktemp -d /dev/shm/spr-verify.XXXXXX) || exit 1
trap 'rm -rf $folder' EXIT
cat > $folder/probe <<'{_END}'
@PROBE@
{_END}
cat > $folder/ask <<'{_END}'
date +%s.%N > $1/$2.before
timeout -k 5 {_NODE_DEADLINE_S} ssh -o ConnectTimeout=20 $2 @PYTHON@ \\
  < $1/probe > $1/$2.out 2> $1/$2.err
echo $? > $1/$2.code
date +%s.%N > $1/$2.after
{_END}
xargs -P 64 -I@ sh $folder/ask $folder @ < ~/hosts
while read node; do
  text=$(tail -n 1 $folder/$node.out)
  [ -n "$text" ] || text=$(tail -n 1 $folder/$node.err)
  echo "{_ANSWER}$node:$(cat $folder/$node.code):$(cat $folder/$node.before):$(cat $folder/$node.after):$text"
done < ~/hosts"""
PYTHON = f"p={VENV}/bin/python; [ -x $p ] || p=python3; exec $p"
"""For a shell on a node: the Python of its stack, else the system's."""
_TIMEOUTS = (124, 137)
_NO_SSH = 255


@dataclass(frozen=True)
class NodeAnswer:
    """What the head heard from one node over node-to-node SSH; ``reason`` is why it heard nothing.

    ``clock_s`` is how far the node's clock is ahead of the head's, ``clock_error_s`` how far that can
    be wrong.
    """

    node: str
    reached: bool
    health: NodeHealth | None = None
    reason: str = ""
    clock_s: float = 0.0
    clock_error_s: float = 0.0


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


def ask_command(stack: Stack) -> str:
    """The one command with which the head asks every node of its hostfile."""
    python = f"{PYTHON} - {shlex.quote(render_question(stack))}"
    script = _ASK_ALL.replace("@PYTHON@", shlex.quote(python))
    return script.replace("@PROBE@", probe_source().rstrip("\n"))


def parse_answers(text: str) -> tuple[NodeAnswer, ...]:
    """The output of the question that the head asks every node."""
    lines = [line for line in text.splitlines() if line.startswith(_ANSWER)]
    answers = [_parse_answer(*line.removeprefix(_ANSWER).split(":", 4)) for line in lines]
    return tuple(sorted(answers, key=lambda answer: int(answer.node.removeprefix("node"))))


def _parse_answer(node: str, code: str, before: str, after: str, text: str) -> NodeAnswer:
    status = int(code or _NO_SSH)
    if status in _TIMEOUTS:
        return NodeAnswer(node, False, reason=f"no answer within {_NODE_DEADLINE_S} s")
    if status == _NO_SSH:
        return NodeAnswer(node, False, reason=text or "ssh gave no reason")
    try:
        health = parse_health(text)
    except ValueError:
        return NodeAnswer(node, True, reason=text or f"the question ended with {status}")
    middle, window = (float(before) + float(after)) / 2, float(after) - float(before)
    return NodeAnswer(node, True, health, "", health.time - middle, window / 2)


def ask_nodes(head: Host, stack: Stack) -> tuple[NodeAnswer, ...]:
    """Have the head ask every node of its hostfile, without a password."""
    return parse_answers(head.run(ask_command(stack), timeout_s=_ASK_DEADLINE_S).stdout)


def ask_directly(host: Host, stack: Stack) -> NodeHealth:
    """Ask one node from this machine; raises :class:`HostError`."""
    argv = f"sh -c {shlex.quote(f'{PYTHON} - {shlex.quote(render_question(stack))}')}"
    command = f"# asking the node what it is\n{argv} <<'{_END}'\n{probe_source()}{_END}"
    answer = host.run(command, timeout_s=_NODE_DEADLINE_S).stdout
    try:
        return parse_health(answer)
    except ValueError as error:
        raise HostError(host.name, f"it can't be asked what it is: {error}") from None


def find_faults(
    cluster: Cluster, answers: Sequence[NodeAnswer], *, amx_required: bool
) -> dict[str, str]:
    """Which nodes can't be used at all, by name with the reason; empty for a good cluster."""
    heard = {answer.node: answer for answer in answers}
    faults = {}
    for node in cluster.nodes:
        answer = heard.get(node.name)
        if answer is None:
            faults[node.name] = "the head got no answer from it"
        elif not answer.reached:
            faults[node.name] = f"the head can't reach it over SSH: {answer.reason}"
        elif answer.health is None:
            faults[node.name] = f"it can't be asked what it is: {answer.reason}"
        elif answer.health.missing_amx and amx_required:
            faults[node.name] = f"no AMX: it lacks {', '.join(answer.health.missing_amx)}"
    return faults
