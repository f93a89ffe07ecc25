"""`make demo` in a fresh clone, twice: its time, its results, and its leftovers.

    python -m benchmarks.demo [--cold]

`--cold` removes the cached base image first, as on a machine that never saw it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import clone, finish, left_behind, run_timed

DEADLINE_S = 1800


def main() -> None:
    """Time both runs and read the results that they fetched."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cold", action="store_true", help="without the cached base image")
    cold = parser.parse_args().cold
    if cold:
        _remove_base_images()
    with tempfile.TemporaryDirectory() as folder:
        checkout = clone(Path(folder, "clone"))
        runs = [_run(checkout) for _ in range(2)]
    first, second = runs
    left = left_behind()
    bars = {
        "first run in 900 s": first["seconds"] <= 900,
        "second run in 180 s": second["seconds"] <= 180,
        "F1 of at least 80": min(first["f1"], second["f1"]) >= 80,
        "two hosts": len(first["hosts"]) == len(second["hosts"]) == 2,
        "nothing left": not any(left.values()),
    }
    finish(
        [bar for bar, reached in bars.items() if not reached],
        benchmark="demo",
        cold=cold,
        first=first,
        second=second,
        left_behind=left,
    )


def _run(checkout: Path) -> dict[str, Any]:
    seconds, _ = run_timed(["make", "demo"], checkout, DEADLINE_S)
    result = json.loads((checkout / "results/demo/results.json").read_text())
    return {
        "seconds": round(seconds, 1),
        "f1": result["f1"],
        "world_size": result["world_size"],
        "hosts": sorted({rank["hostname"] for rank in result["ranks"]}),
    }


def _remove_base_images() -> None:
    listed = subprocess.run(
        ["podman", "images", "--format", "{{.Repository}}:{{.Tag}}"],
        capture_output=True,
        text=True,
        check=True,
    )
    for image in listed.stdout.split():
        if "spr-" in image and "base" in image:
            subprocess.run(["podman", "rmi", image], check=True)


if __name__ == "__main__":
    main()
