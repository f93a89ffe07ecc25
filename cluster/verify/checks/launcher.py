"""Can mpirun start a rank on every node? Pure."""

from __future__ import annotations

from cluster.verify.checks.result import CLUSTER, CheckResult, Verdict
from cluster.verify.launcher_probe import LauncherReport


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
