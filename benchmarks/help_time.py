"""Time of `spr-cluster --help`, compared with an interpreter that does nothing.

python -m benchmarks.help_time
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.common import finish

RUNS = 15


def main() -> None:
    """Run both commands in turn, so that a slow moment of the machine affects both."""
    commands = {
        "help_s": [sys.executable, "-m", "jobs", "--help"],
        "python_s": [sys.executable, "-c", "pass"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(RUNS):
        for name, argv in commands.items():
            start = time.perf_counter()
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: round(statistics.median(values), 4) for name, values in seconds.items()}
    missed = ["0.25 s"] if medians["help_s"] >= 0.25 else []
    finish(missed, benchmark="help_time", runs=RUNS, limit_s=0.25, **medians)


if __name__ == "__main__":
    main()
