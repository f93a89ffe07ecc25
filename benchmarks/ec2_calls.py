"""Number of EC2 calls of `up` and `down`, for clusters of 4, 64, and 256 nodes.

`python -m benchmarks.ec2_calls [--sizes N …]`

Warm: the image is there (`down --keep-image` before). Cold: it has to be made. EC2's API is the
embedded cloud's, the machines are pretended and start at once: waiting for real ones adds a call
every 15 seconds, however many they are.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from benchmarks.common import finish
from tests.harness.cloud import CloudProcess, cloud_process
from tests.harness.runs import DONE, run_down, run_in_process, run_keep_image, run_up

SIZES = (4, 64, 256)
# One call looks for open capacity reservations.
MOST_FOR_4, MOST_MORE = 26, 10
# The largest cluster needs 256 x 64 vCPUs.
FAULTS = 'profile = "fast"\n[quota]\non_demand_vcpus = 100000\n'


def count(cloud: CloudProcess, home: Path, nodes: int) -> dict[str, int]:
    """Return the calls of each command in the life of one cluster."""
    cloud.new(FAULTS)
    subprocess.run(["rm", "-rf", str(home)], check=True)
    calls: dict[str, int] = {}
    for name, work, wish in (
        ("cold", run_up, {"nodes": nodes}),
        ("again", run_up, {}),
        ("keep_image", run_keep_image, {}),
        ("warm", run_up, {"nodes": nodes}),
        ("down", run_down, {}),
    ):
        before = cloud.calls()
        run = run_in_process(cloud, home, work, wish)
        assert run.code == DONE, run.error
        calls[name] = sum((cloud.calls() - before).values())
    assert cloud.left() == []
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of nodes")
    sizes = parser.parse_args().sizes
    with tempfile.TemporaryDirectory() as folder, cloud_process(Path(folder, "cloud")) as cloud:
        counts = {nodes: count(cloud, Path(folder, "home"), nodes) for nodes in sizes}
    print(f"{'nodes':>6} {'cold up':>8} {'up again':>9} {'warm up':>8} {'down':>6}")
    for nodes, calls in counts.items():
        row = (calls["cold"], calls["again"], calls["warm"], calls["down"])
        print(f"{nodes:>6} {row[0]:>8} {row[1]:>9} {row[2]:>8} {row[3]:>6}")
    warm = {nodes: calls["warm"] for nodes, calls in counts.items()}
    first, *others = sizes
    missed = [f"{first} nodes: {warm[first]}"] if warm[first] > MOST_FOR_4 else []
    missed += [f"{n} nodes: {warm[n]}" for n in others if warm[n] > warm[first] + MOST_MORE]
    finish(missed, benchmark="ec2_calls", calls={str(nodes): c for nodes, c in counts.items()})


if __name__ == "__main__":
    main()
