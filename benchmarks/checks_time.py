"""`make test` in a fresh clone: its time, and pytest's closing line.

python -m benchmarks.checks_time
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from benchmarks.common import clone, finish, left_behind, run_timed

DEADLINE_S = 3600


def main() -> None:
    """Clone, run, and print pytest's closing line."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = clone(Path(folder, "clone"))
        seconds, output = run_timed(["make", "test"], checkout, DEADLINE_S)
    closing = re.findall(r"^=+ (.* in [\d.]+s.*?) =+$", output, re.MULTILINE)
    finish(
        [] if seconds <= 1200 else ["1200 s"],
        benchmark="checks_time",
        seconds=round(seconds, 1),
        limit_s=1200,
        pytest=closing[-1],
        left_behind=left_behind(),
    )


if __name__ == "__main__":
    main()
