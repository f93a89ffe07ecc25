"""python -m benchmarks.side_by_side --name NAME: two jobs of one core each, on neighbors and alone, in turn.

A node needs two free cores. Each job counts training steps of a small network for 10 s.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.common import finish

_WORK = """import json, time, torch
net, done = torch.nn.Sequential(*[torch.nn.Linear(768, 768) for _ in range(6)]), 0
time.sleep(max(0, {at} - time.time()))
wall, cpu, x = time.time(), time.process_time(), torch.randn(128, 768)
while time.time() < wall + 10: net(x).square().mean().backward(); done += 1
print("@", json.dumps([done / (time.time() - wall), done / (time.process_time() - cpu)]))"""


def measure(name: str, jobs: int) -> list[list[float]]:
    """Return each job's steps per second of wall time, and of its own CPU time."""
    argv = [sys.executable, "-m", "jobs", "run", "--name", name, "--cores=1", "--folder=none"]
    argv += [f"--env=WORK={_WORK.format(at=time.time() + 15)}", "--", "python", "-c"]
    argv += ["import os; exec(os.environ['WORK'])"]
    with ThreadPoolExecutor() as pool:
        shown = pool.map(lambda _: subprocess.check_output(argv, stderr=-2, text=True), range(jobs))
    return [json.loads(text.partition("@ ")[2].splitlines()[0]) for text in shown]


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--name", required=True)
args, together, each = parser.parse_args(), [], []
for turn in range(5):
    found = {jobs: measure(args.name, jobs) for jobs in ((1, 2) if turn % 2 else (2, 1))}
    together.append(sum(job[0] for job in found[2]) / found[1][0][0])
    each.append(statistics.mean(job[1] for job in found[2]) / found[1][0][1])
best = map(statistics.median, (together, each))
missed = [f"{a:.2f} of {b}" for a, b in zip(best, (1.8, 0.95), strict=True) if a < b]
finish(missed, throughput=together, throughput_by_cpu_time=each)
