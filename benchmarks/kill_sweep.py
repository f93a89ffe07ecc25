"""Kill `up` at every AWS call and every SSH step, before and after its effect; then `up`, or `down`.

`python -m benchmarks.kill_sweep [--every N] [--scenario cold|at-once|warm|…] [--jobs N]`

At each point of a new cluster, the process gets SIGKILL. Then (a) another `up` must reach the same cluster as
an uninterrupted run, with no resource twice, and (b) in another run, `down` must leave nothing: no instance,
volume, image, group, or key, counted in the cloud itself, with or without tags. EC2 shows new resources two
seconds late. The machines are simulated; EC2's API, the processes, the signals, and the files are real.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import choose, finish, run_sweep
from tests.harness.cloud import CloudProcess, cloud_process
from tests.harness.runs import (
    DONE,
    Kill,
    Run,
    defects,
    describe,
    fingerprint,
    run_down,
    run_in_process,
    run_keep_image,
    run_up,
)

FAULTS = 'profile = "fast"\nvisibility_s = 2.0\n'
# What is there before the `up` that is killed.
SCENARIOS: dict[str, tuple[tuple[Any, dict[str, Any]], ...]] = {
    "cold": (),
    "at-once": (),
    "warm": ((run_up, {"nodes": 2}), (run_keep_image, {})),
    "grow": ((run_up, {"nodes": 2}),),
    "move": (),
    "replace": (),
}
# What goes wrong besides.
MORE_FAULTS = {
    # Capacity for the head in the first zone, not for its workers.
    "move": '[[capacity]]\nzone = "us-east-1a"\nfree = 1\n',
    "replace": '[[machine]]\nn = 1\nfate = "dies"\n[[machine]]\nn = 3\nfate = "no-ssh"\n',
}
# Where there is no image: the head first, and the others from an image of it; or all at once.
WISH = {"nodes": 3, "bake": "head"}
WISHES = {"at-once": {"nodes": 3, "bake": "none"}}
MOMENTS = ("before", "after")
RECOVERIES = {"up": run_up, "down": run_down}


def begin(cloud: CloudProcess, home: Path, scenario: str) -> None:
    """Create a new cloud with the scenario's resources."""
    cloud.new(FAULTS + MORE_FAULTS.get(scenario, ""))
    subprocess.run(["rm", "-rf", str(home)], check=True)
    for work, given in SCENARIOS[scenario]:
        run = run_in_process(cloud, home, work, given)
        assert run.code == DONE, run.error
    cloud.time.sleep(60)


def judge(
    cloud: CloudProcess, home: Path, recovery: str, wish: dict[str, Any], wanted: dict[str, Any]
) -> str:
    """Recover once; return what is wrong then, or ``""``."""
    run = run_in_process(cloud, home, RECOVERIES[recovery], wish)
    if run.code != DONE:
        return f"{recovery} ended with {run.code}: {run.error}"
    if wrong := defects(cloud):
        return wrong
    cloud.time.sleep(10)
    if recovery == "down":
        left = cloud.left()
        return f"left after down: {left}" if left else ""
    found = fingerprint(describe(cloud))
    return "" if found == wanted else f"{found} instead of {wanted}"


def try_point(
    cloud: CloudProcess, home: Path, scenario: str, kill: Kill, wanted: dict[str, Any]
) -> list[str]:
    """Kill there and recover, both ways; return what went wrong."""
    wrong, wish = [], WISHES.get(scenario, WISH)
    for recovery in RECOVERIES:
        begin(cloud, home, scenario)
        run = run_in_process(cloud, home, run_up, wish, kill)
        where = f"{scenario}, {kill}, then {recovery}"
        if not run.was_killed and run.code != DONE:
            wrong.append(f"{where}: up ended with {run.code}: {run.error}")
        elif problem := judge(cloud, home, recovery, wish, wanted):
            wrong.append(f"{where}: {problem}")
    return wrong


def measure(cloud: CloudProcess, home: Path, scenario: str) -> tuple[Run, dict[str, Any]]:
    """Return an uninterrupted run's events and cluster."""
    begin(cloud, home, scenario)
    run = run_in_process(cloud, home, run_up, WISHES.get(scenario, WISH))
    assert run.code == DONE, run.error
    cloud.time.sleep(10)
    return run, fingerprint(describe(cloud))


def sweep(
    cloud: CloudProcess, root: Path, scenario: str, every: int, job: int, jobs: int
) -> dict[str, Any]:
    """Try this process's share of the points."""
    home = root / "home"
    run, wanted = measure(cloud, home, scenario)
    kinds = [event.split()[0] for event in run.events]
    points = [
        Kill(kind, number, moment)
        for kind in ("call", "step")
        for number in range(kinds.count(kind))
        for moment in MOMENTS
    ]
    mine = choose(points, every)[job::jobs]
    wrong = []
    for kill in mine:
        problems = try_point(cloud, home, scenario, kill, wanted)
        print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr, flush=True)
        wrong += problems
    counts = {"calls": kinds.count("call"), "steps": kinds.count("step")}
    return {**counts, "runs": len(mine) * len(RECOVERIES), "wrong": wrong}


def main() -> None:
    results = run_sweep("benchmarks.kill_sweep", __doc__, tuple(SCENARIOS), cloud_process, sweep)
    points = {
        name: {key: result[key] for key in ("calls", "steps")} for name, result in results.items()
    }
    runs = sum(result["runs"] for result in results.values())
    wrong = [line for result in results.values() for line in result["wrong"]]
    percent = round(100 * (1 - len(wrong) / runs), 2)
    finish(wrong, benchmark="kill_sweep", points=points, kills=runs, recovered_percent=percent)


if __name__ == "__main__":
    main()
