"""Ask every node for its health: the head does, over the SSH path that jobs use."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.nodes import Cluster
from infra.errors import HostError
from provision.facts import AMX_FLAGS, HostFacts, probe_source
from provision.health import NodeHealth, parse_health, render_question
from provision.host import Host
from provision.install import VENV
from provision.stacks.stack import Stack

_ANSWER = "answer:"
_END = "_END_OF_THE_PROBE_"
_NODE_DEADLINE_S = 60
_ALL_DEADLINE_S = 5 * 60
# From the head to all nodes at once; a node that does not answer in time is named, not waited for. If
# the stack's environment is missing, the system's Python still reports the rest. Each answer goes to
# its own file in memory: in one pipe answers could mix, and the disk could be full.
_PROBE_ALL = f"""# probing every node
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
"""Shell command for a node: the Python of its stack, or else the system's."""
_TIMEOUTS = (124, 137)
_NO_SSH = 255

HealthByNode = Mapping[str, NodeHealth]


@dataclass(frozen=True)
class NodeAnswer:
    """A node's answer to the head over SSH; ``reason`` says why there is no health.

    ``clock_s`` is how far the node's clock is ahead of the head's, ``clock_error_s`` the error of that.
    """

    node: str
    reached: bool
    health: NodeHealth | None = None
    reason: str = ""
    clock_s: float = 0.0
    clock_error_s: float = 0.0

    @property
    def problem(self) -> str:
        """Why the head can't use the node; empty if it can."""
        if not self.reached:
            return f"the head can't connect over SSH: {self.reason}"
        return "" if self.health else f"the probe failed: {self.reason}"


def require_amx(facts: Mapping[str, HostFacts], *, required: bool) -> str:
    """Check for AMX and return a note for the user.

    Raises :class:`HostError` if AMX is required and missing.
    """
    lacking = {name: fact for name, fact in facts.items() if fact.missing_amx}
    if not lacking:
        return "AMX available: " + ", ".join(sorted(AMX_FLAGS))
    name, fact = next(iter(lacking.items()))
    text = f"no AMX: {fact.model} lacks {', '.join(fact.missing_amx)}"
    if required:
        raise HostError(
            name,
            text,
            hint="choose a type with AMX (--instance-type r7iz.metal-16xl), "
            "or continue without it: --allow-no-amx",
        )
    return f"{text}; continuing without AMX; training will be slower"


def probe_command(stack: Stack) -> str:
    """Return the one command with which the head probes every node of its hostfile."""
    python = f"{PYTHON} - {shlex.quote(render_question(stack))}"
    script = _PROBE_ALL.replace("@PYTHON@", shlex.quote(python))
    return script.replace("@PROBE@", probe_source().rstrip("\n"))


def parse_answers(text: str) -> tuple[NodeAnswer, ...]:
    """Parse the output of :func:`probe_command`, in rank order."""
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
        return NodeAnswer(node, True, reason=text or f"exit code {status}")
    middle, window = (float(before) + float(after)) / 2, float(after) - float(before)
    return NodeAnswer(node, True, health, "", health.time - middle, window / 2)


def probe_nodes(head: Host, stack: Stack) -> tuple[NodeAnswer, ...]:
    """Have the head probe every node of its hostfile."""
    return parse_answers(head.run(probe_command(stack), timeout_s=_ALL_DEADLINE_S).stdout)


def probe_directly(host: Host, stack: Stack) -> NodeHealth:
    """Probe one node from this machine. Raises :class:`HostError`."""
    argv = f"sh -c {shlex.quote(f'{PYTHON} - {shlex.quote(render_question(stack))}')}"
    command = f"# probing this node\n{argv} <<'{_END}'\n{probe_source()}{_END}"
    answer = host.run(command, timeout_s=_NODE_DEADLINE_S).stdout
    try:
        return parse_health(answer)
    except ValueError as error:
        raise HostError(host.name, f"the probe failed: {error}") from None


def find_unusable(
    cluster: Cluster, answers: Sequence[NodeAnswer], *, amx_required: bool
) -> dict[str, str]:
    """Return the nodes that jobs can't use, with the reason; empty for a healthy cluster."""
    by_node = {answer.node: answer for answer in answers}
    reasons = {}
    for node in cluster.nodes:
        answer = by_node.get(node.name)
        if answer is None:
            reasons[node.name] = "the head got no answer"
        elif answer.problem or answer.health is None:
            reasons[node.name] = answer.problem
        elif answer.health.missing_amx and amx_required:
            reasons[node.name] = f"no AMX: lacks {', '.join(answer.health.missing_amx)}"
    return reasons
