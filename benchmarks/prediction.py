"""python -m benchmarks.prediction --name NAME: the end that `jobs` expects after a minute, and the real one.

The cluster is the embedded cloud's. The longest job is about twice as long as the shortest.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from typing import Any

from benchmarks.common import finish

BAR = 0.15


def ask(*words: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "jobs", *words, "--name", args.name, "--json"]
    found: dict[str, Any] = json.loads(subprocess.check_output(argv))
    return found


def seconds_between(begin: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


def measure(epochs: int) -> float:
    """Return how far off the expected length of a job was, relative to its length, from start to end."""
    with tempfile.TemporaryDirectory() as results:
        more = (f"--epochs={epochs}", "--detach", f"--results={results}")
        job = ask("train", "squad", "--demo", *more)["job"]
    while not (state := ask("jobs", job))["began"]:
        time.sleep(1)
    began = datetime.fromisoformat(state["began"]).timestamp()
    time.sleep(max(0.0, began + 60 - time.time()))
    if not (expected := ask("jobs", job)["expected_end"]):
        raise SystemExit(f"{job} was not training after a minute: give more --epochs")
    ended = ask("wait", job)["ended"]
    length = seconds_between(state["began"], ended)
    print(f"{epochs} epochs: {length:.0f} s", file=sys.stderr)
    return seconds_between(ended, expected) / length


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--name", required=True)
parser.add_argument("--epochs", type=int, default=500, help="of the shortest job")
parser.add_argument("--runs", type=int, default=10)
args = parser.parse_args()
off = [measure(args.epochs + args.epochs * run // args.runs) for run in range(args.runs)]
far = sum(abs(each) > BAR for each in off)
finish(
    [f"{far} of {len(off)}"] if far > len(off) // 10 else [], off=[round(each, 3) for each in off]
)
