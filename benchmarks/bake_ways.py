"""Cold and warm `up --nodes 3` on the embedded cloud, by phase and by source of the software.

`python -m benchmarks.bake_ways [--nodes 3] [--rounds 3]`

In each round: a cold `up` with `--bake head` and one with `--bake none`, then warm ones of the image
that was kept: of one node, whose phase "Nodes" is the time from RunInstances to SSH, and of all nodes.
The plain sum to compare with is head boot + installation + image + worker boot of the cold run.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.common import ROOT, finish, left_behind, run_timed

DEADLINE_S = 1800
# A phase as it is told where nobody watches: "done in 4.2 s: Head node: 1 x …".
_PHASE = re.compile(r"^ +done in (?:(\d+) min )?([\d.]+) s: ([A-Z][a-z ]+):", re.MULTILINE)
WARM_FACTOR, WARM_EXTRA_S = 1.25, 5.0


def spr_cluster(home: Path, *argv: str) -> tuple[float, dict[str, float]]:
    """Return the seconds of a command and of its phases."""
    command = [sys.executable, "-m", "jobs", *argv, "--cloud", "local"]
    seconds, text = run_timed(command, ROOT, DEADLINE_S, SPR_CLUSTER_HOME=str(home))
    phases = {
        title: 60 * int(minutes or 0) + float(rest) for minutes, rest, title in _PHASE.findall(text)
    }
    return seconds, {"total": round(seconds, 1), **phases}


def run_round(home: Path, nodes: int) -> dict[str, dict[str, float]]:
    """Return the times of one round, by kind of `up`."""
    result = {}
    for way in ("none", "head"):
        _, result[f"cold {way}"] = spr_cluster(home, "up", "--nodes", str(nodes), "--bake", way)
        spr_cluster(home, "down", *(["--keep-image"] if way == "head" else []))
    for count, name in ((1, "warm one"), (nodes, "warm")):
        _, result[name] = spr_cluster(home, "up", "--nodes", str(count), "--name", f"warm{count}")
        spr_cluster(home, "down", "--name", f"warm{count}")
    spr_cluster(home, "down")
    return result


def summarize(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median of each phase."""
    return {
        name: {
            phase: round(median(result[name].get(phase, 0.0) for result in rounds), 1)
            for phase in rounds[0][name]
        }
        for name in rounds[0]
    }


def main() -> None:
    """Run the rounds, then remove everything."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        try:
            times = summarize([run_round(home, args.nodes) for _ in range(args.rounds)])
        finally:
            reset = [sys.executable, "-m", "jobs", "local", "reset", "--keep-base"]
            run_timed(reset, ROOT, DEADLINE_S, SPR_CLUSTER_HOME=str(home))
    cold, warm, boot = times["cold head"], times["warm"], times["warm one"]["Nodes"]
    plain_sum = sum(cold[phase] for phase in ("Head node", "Software", "Image", "Workers"))
    limit = WARM_FACTOR * boot + WARM_EXTRA_S
    left = {kind: names for kind, names in left_behind().items() if names}
    bars = {
        f"warm within {WARM_FACTOR} x boot + {WARM_EXTRA_S:.0f} s": warm["total"] <= limit,
        "nothing installed when warm": "Software" not in warm,
        "nothing left": not left,
    }
    finish(
        [bar for bar, reached in bars.items() if not reached],
        benchmark="bake_ways",
        nodes=args.nodes,
        rounds=args.rounds,
        seconds=times,
        plain_sum=round(plain_sum, 1),
        boot_of_one=boot,
        warm_limit=round(limit, 1),
        left_behind=left,
    )


if __name__ == "__main__":
    main()
