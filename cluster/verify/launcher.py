"""Can mpirun start a rank on every node that imports torch?"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.verify.results import CLUSTER, CheckResult, Verdict
from provision.host import Host
from provision.install import HOSTFILE, MPIRUN_ENV, VENV, explain_mpi_failure

_DEADLINE_S = 120
_COLD_DEADLINE_S = 15 * 60
_TIMEOUT = 124
_ANSWER = re.compile(r"^hello (\d+) (torch|error) (.*)$", re.MULTILINE)
# A failing rank would make mpirun kill the others before they answer, so every rank exits with 0.
_TRY = (
    r"try:\n import torch; answer = 'torch ' + torch.__version__"
    r"\nexcept Exception as e: answer = 'error ' + ' '.join(str(e).split())"
)
# On one line, as mpirun's argument forwarding requires.
_PROGRAM = f'import os; exec("{_TRY}"); print("hello", os.environ["PMI_RANK"], answer)'


@dataclass(frozen=True)
class LauncherReport:
    """The version of torch by node, or the ``errors`` of nodes that can't import it.

    ``error`` is the reason if mpirun as a whole failed.
    """

    torch: dict[str, str]
    errors: dict[str, str] = field(default_factory=dict)
    error: str | None = None


def launcher_command(nodes: int, deadline_s: int = _DEADLINE_S) -> str:
    """Return mpirun as a job starts it, with a deadline, because it waits forever for a closed port."""
    exports = "; ".join(f"export {name}={shlex.quote(value)}" for name, value in MPIRUN_ENV.items())
    argv = [f"{VENV}/bin/mpirun", "-f", HOSTFILE, "-n", str(nodes), "-ppn", "1"]
    argv += ["-bootstrap", "ssh", f"{VENV}/bin/python", "-I", "-c", _PROGRAM]
    return f"{exports}; timeout -k 5 {deadline_s} {shlex.join(argv)} < /dev/null"


def probe_launcher(head: Host, nodes: Sequence[str], *, cold: bool = False) -> LauncherReport:
    """Start a rank on every node of the hostfile and collect their answers.

    With ``cold`` disks, the import of torch may load gigabytes from S3.
    """
    limit = _COLD_DEADLINE_S if cold else _DEADLINE_S
    command = launcher_command(len(nodes), limit)
    done = head.run(command, timeout_s=limit + 30, check=False)
    # One rank per node, in the hostfile's order.
    answers = {nodes[int(rank)]: (kind, text) for rank, kind, text in _ANSWER.findall(done.stdout)}
    torch = {node: text for node, (kind, text) in answers.items() if kind == "torch"}
    errors = {node: text for node, (kind, text) in answers.items() if kind == "error"}
    if done.exit_code == 0 and len(answers) == len(nodes):
        return LauncherReport(torch, errors)
    if done.exit_code == _TIMEOUT:
        return LauncherReport(torch, errors, f"mpirun did not finish within {limit} s")
    lines = f"{done.stdout}\n{done.stderr}".splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    count = f"{len(answers)} of {len(nodes)} nodes answered"
    why = explain_mpi_failure(lines) or f"exit code {done.exit_code}: {last}"
    return LauncherReport(torch, errors, count if done.exit_code == 0 else f"{count}: {why}")


def check_launcher(report: LauncherReport) -> list[CheckResult]:
    """Fail for mpirun as a whole, or for each node whose rank can't import torch."""
    wanted = "a rank on each node that imports torch"
    if report.error:
        remedy = (
            "Fix the other failures first. If it still fails, `train` shows all of mpirun's output"
        )
        return [CheckResult(CLUSTER, "mpirun", Verdict.FAIL, report.error, wanted, remedy)]
    if report.errors:
        remedy = "Fix the other failures on this node first. If none, recreate the cluster"
        return [
            CheckResult(node, "mpirun", Verdict.FAIL, f"no torch: {reason}", wanted, remedy)
            for node, reason in report.errors.items()
        ]
    versions = ", ".join(sorted(set(report.torch.values())))
    found = f"a rank on each of {len(report.torch)} nodes, torch {versions}"
    return [CheckResult(CLUSTER, "mpirun", Verdict.OK, found)]
