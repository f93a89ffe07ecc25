"""All checks that need only the answers of the single nodes; ``up`` ends with them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.verify.checks.expected import Expected
from cluster.verify.checks.lifetime import check_lifetimes
from cluster.verify.checks.machine import check_machines
from cluster.verify.checks.reachability import check_reachability
from cluster.verify.checks.result import CheckResult, Verdict, sort_results
from cluster.verify.checks.software import check_software
from cluster.verify.node_probe import NodeAnswer

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
