"""Ask every node for its health: the head does, over the SSH path that jobs use."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from cluster.nodes import Cluster
from cluster.verify.machine import check_machines
from cluster.verify.reachability import check_lifetimes, check_reachability
from cluster.verify.results import CheckResult, Expected, NodeAnswer, Verdict, sort_results
from cluster.verify.software import check_software
from infra.errors import HostError
from provision.facts import (
    NodeHealth,
    parse_health,
    probe_source,
    render_question,
)
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


_MAX_SHOWN = 3


def check_nodes(answers: Sequence[NodeAnswer], expected: Expected) -> tuple[CheckResult, ...]:
    """Check every node by its own answer. Results are grouped by check, in node order."""
    by_node = {answer.node: answer.health for answer in answers if answer.health}
    results = [
        *check_reachability(answers, expected),
        *check_lifetimes(by_node, expected),
        *check_machines(by_node, expected),
        *check_software(by_node, expected),
    ]
    return sort_results(results, expected.addresses)


def summarize_problems(results: Sequence[CheckResult], expected: Expected) -> str:
    """Return the problems in half a line with the command for details; empty if there are none."""
    # `up` reports missing AMX separately.
    wrong = [r for r in results if r.verdict in (Verdict.FAIL, Verdict.WARN) and r.check != "amx"]
    if not wrong:
        return ""
    wrong.sort(key=lambda result: result.verdict is not Verdict.FAIL)
    shown = "; ".join(f"{r.node}: {r.check}: {r.found}" for r in wrong[:_MAX_SHOWN])
    more = f"; and {len(wrong) - _MAX_SHOWN} more" if len(wrong) > _MAX_SHOWN else ""
    return f"; problems: {shown}{more} (details: {expected.command('verify')})"
