"""Can mpirun start a rank on every node that imports torch?"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

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


def launcher_command(nodes: int, deadline_s: int = _DEADLINE_S) -> str:
    """Return mpirun as a job starts it, with a deadline, because it waits forever for a closed port."""
    exports = "; ".join(f"export {name}={shlex.quote(value)}" for name, value in MPIRUN_ENV.items())
    argv = [f"{VENV}/bin/mpirun", "-f", HOSTFILE, "-n", str(nodes), "-ppn", "1"]
    argv += ["-bootstrap", "ssh", f"{VENV}/bin/python", "-I", "-c", _PROGRAM]
    return f"{exports}; timeout -k 5 {deadline_s} {shlex.join(argv)} < /dev/null"


def check_launcher(head: Host, nodes: Sequence[str], *, cold: bool = False) -> list[CheckResult]:
    """Start a rank on every node of the hostfile; fail for mpirun, or for each node without torch.

    With ``cold`` disks, the import of torch may load gigabytes from S3.
    """
    limit = _COLD_DEADLINE_S if cold else _DEADLINE_S
    command = launcher_command(len(nodes), limit)
    done = head.run(command, timeout_s=limit + 30, check=False)
    # One rank per node, in the hostfile's order.
    answers = {nodes[int(rank)]: (kind, text) for rank, kind, text in _ANSWER.findall(done.stdout)}
    wanted = "a rank on each node that imports torch"
    if done.exit_code or len(answers) < len(nodes):
        found = f"{len(answers)} of {len(nodes)} nodes answered"
        if done.exit_code == _TIMEOUT:
            found = f"mpirun did not finish within {limit} s"
        elif done.exit_code:
            lines = f"{done.stdout}\n{done.stderr}".splitlines()
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            why = explain_mpi_failure(lines) or f"exit code {done.exit_code}: {last}"
            found = f"{found}: {why}"
        remedy = (
            "Fix the other failures first. If it still fails, `train` shows all of mpirun's output"
        )
        return [CheckResult(CLUSTER, "mpirun", Verdict.FAIL, found, wanted, remedy)]
    remedy = "Fix the other failures on this node first. If none, recreate the cluster"
    failed = [
        CheckResult(node, "mpirun", Verdict.FAIL, f"no torch: {text}", wanted, remedy)
        for node, (kind, text) in answers.items()
        if kind == "error"
    ]
    versions = ", ".join(sorted({text for _, text in answers.values()}))
    found = f"a rank on each of {len(nodes)} nodes, torch {versions}"
    return failed or [CheckResult(CLUSTER, "mpirun", Verdict.OK, found)]
