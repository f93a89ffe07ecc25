"""Time until a cluster with a lifetime of one minute is gone after its owner's process was killed.

`python -m benchmarks.ttl`

On the embedded cloud, with a real machine (container, systemd, cloud-init). No command is run
meanwhile but to look; then `gc` must find and remove what EC2 does not remove by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.common import ROOT, finish

BAR_S = 120.0
_DEADLINE_S = 300.0


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "SPR_CLUSTER_HOME": home}
        try:
            measure(environment)
        finally:
            _run(environment, "local", "reset", "--keep-base")


def _run(environment: dict[str, str], *arguments: str) -> str:
    argv = [sys.executable, "-m", "jobs", *arguments]
    done = subprocess.run(
        argv, env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    )
    return done.stdout


def _resources(environment: dict[str, str]) -> dict[str, Any]:
    result = json.loads(_run(environment, "status", "--cloud", "local", "--json"))
    found: dict[str, Any] = result["resources"]
    return found


def measure(environment: dict[str, str]) -> None:
    """Create, kill, wait, and clean up; print the result."""
    _run(environment, "list", "--cloud", "local")  # the embedded cloud is there
    argv = [sys.executable, "-m", "jobs", "up", "--cloud", "local", "--ttl", "1m"]
    start = time.monotonic()
    with subprocess.Popen(
        argv, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stderr is not None
        for line in owner.stderr:
            if "bought:" in line:
                break
        bought = time.monotonic()
        owner.kill()
    while "instances" in _resources(environment) and time.monotonic() - start < _DEADLINE_S:
        time.sleep(1)
    gone = time.monotonic()
    rest = sorted(_resources(environment))
    _run(environment, "gc", "--cloud", "local")
    left = _resources(environment)
    missed = [f"gone after {gone - start:.0f} s"] if gone - start > BAR_S else []
    missed += [f"left after gc: {left}"] if left else []
    finish(
        missed,
        benchmark="ttl",
        seconds_from_start=round(gone - start, 1),
        seconds_from_purchase=round(gone - bought, 1),
        removed_by_gc=rest,
    )


if __name__ == "__main__":
    main()
