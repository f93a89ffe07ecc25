"""Create/destroy cycles under random faults: `up`, then `down`, must always leave nothing.

`python -m benchmarks.storm [--runs 200] [--seed N] [--jobs N]`

In every run, three of ten calls are throttled, and new resources appear late. Random faults: zones without
capacity, calls that fail or lose their answer, a machine that never boots, dies, has no SSH or no AMX, spot,
and a network that lets no SSH through, because of which no machine may be replaced.
Each `up` must end with a verified cluster or a clear failure, each `down` with nothing left, counted in the
cloud itself. `--seed 7 --only 13` repeats one run.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import finish, run_shares
from tests.harness.cloud import CloudProcess, cloud_process
from tests.harness.runs import BROKEN, DONE, defects, run_down, run_in_process, run_up

ZONES = [f"us-east-1{letter}" for letter in "abcdef"]
FATES = ("never-boots", "dies", "no-ssh", "no-amx", "impaired")
# Calls of `up` whose failure, or whose lost answer, must be survived.
CALLS = (
    "CreateSecurityGroup",
    "AuthorizeSecurityGroupIngress",
    "ImportKeyPair",
    "CreatePlacementGroup",
    "RunInstances",
    "CreateImage",
    "CreateTags",
    "DescribeInstances",
)


CUT = '[network]\nssh = "blocked"'


def make_faults(dice: random.Random) -> str:
    """Return one run's faults file."""
    lines = [
        f"seed = {dice.randrange(1 << 30)}",
        f'profile = "{dice.choice(["instant", "fast", "metal"])}"',
        f"visibility_s = {dice.uniform(0, 4):.1f}",
        '[[throttle]]\naction = "*"\nrate = 0.3',
    ]
    for zone in dice.sample(ZONES, dice.randint(0, len(ZONES))):
        free, group = dice.choice([0, 0, 1, 2]), dice.choice(["true", "false"])
        lines.append(f'[[capacity]]\nzone = "{zone}"\nfree = {free}\ngroup = {group}')
    is_cut = dice.random() < 0.15
    lines += [CUT] if is_cut else []
    for _ in range(0 if is_cut else dice.randint(0, 2)):
        lines.append(f'[[machine]]\nn = {dice.randint(0, 4)}\nfate = "{dice.choice(FATES)}"')
    for action in dice.sample(CALLS, dice.randint(0, 2)):
        effect = dice.choice(["true", "false"])
        lines.append(
            f'[[error]]\naction = "{action}"\ncode = "InternalError"\ntimes = 1\neffect = {effect}'
        )
    return "\n".join(lines) + "\n"


def make_request(dice: random.Random) -> dict[str, Any]:
    """Return the cluster to request in one run."""
    wish: dict[str, Any] = {"nodes": dice.randint(1, 5)}
    if dice.random() < 0.3:
        wish["instance_types"] = ("r7iz.metal-16xl", "m7i.metal-24xl")
    if dice.random() < 0.3:
        wish |= {"spot": True, "on_demand_allowed": dice.random() < 0.5}
    wish["bake"] = dice.choice(["head", "none"])
    return wish


def run_once(cloud: CloudProcess, home: Path, seed: int, number: int) -> dict[str, Any]:
    """Do one run; ``wrong`` is empty if it passed."""
    dice = random.Random(f"{seed}-{number}")
    subprocess.run(["rm", "-rf", str(home)], check=True)
    faults, wish = make_faults(dice), make_request(dice)
    cloud.new(faults)
    start = time.monotonic()
    up = run_in_process(cloud, home, run_up, wish)
    counts = cloud.calls()
    calls = sum(counts.values())
    down = run_in_process(cloud, home, run_down)
    wrong = []
    if CUT in faults and (up.code == DONE or counts["TerminateInstances"]):
        wrong.append("machines that the network hides were replaced")
    if up.code == BROKEN or up.was_killed or (up.code != DONE and not up.error.strip()):
        wrong.append(f"up: {up.code}: {up.error}")
    if down.code != DONE:
        wrong.append(f"down: {down.code}: {down.error}")
    if left := cloud.left():
        wrong.append(f"left: {left}")
    if flaw := defects(cloud):
        wrong.append(flaw)
    reason = up.error.splitlines()[0] if up.error else ""
    result = {"number": number, "ok": up.code == DONE, "reason": reason, "calls": calls}
    return {**result, "seconds": time.monotonic() - start, "wrong": wrong, "faults": faults}


def storm(root: Path, seed: int, numbers: list[int]) -> list[dict[str, Any]]:
    """Do several runs in turn, on one cloud's process."""
    results = []
    with cloud_process(root / "cloud") as cloud:
        for number in numbers:
            result = run_once(cloud, root / "home", seed, number)
            end = "cluster" if result["ok"] else result["reason"][:100]
            print(f"{number}: {result['calls']} calls, {end}", file=sys.stderr, flush=True)
            for problem in result["wrong"]:
                print(f"  WRONG {problem}\n{result['faults']}", file=sys.stderr, flush=True)
            results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--only", type=int, help="only this run")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    numbers = [args.only] if args.only is not None else list(range(args.runs))
    if args.job is not None:
        with tempfile.TemporaryDirectory() as root:
            print(json.dumps(storm(Path(root), args.seed, numbers[args.job :: args.jobs])))
        return
    options = [f"--runs={args.runs}", f"--seed={args.seed}"]
    options += [f"--only={args.only}"] if args.only is not None else []
    shares = run_shares("benchmarks.storm", options, args.jobs)
    report(args.seed, [result for share in shares for result in share])


def report(seed: int, results: list[dict[str, Any]]) -> None:
    """Print the last line: how the runs ended, and what they cost."""
    slowest = max(results, key=lambda result: result["seconds"])
    calls = sorted(result["calls"] for result in results)
    wrong = [f"run {r['number']}: {w}" for r in results for w in r["wrong"]]
    finish(
        wrong,
        benchmark="storm",
        seed=seed,
        runs=len(results),
        verified=sum(result["ok"] for result in results),
        clear_failures=sum(not result["ok"] and not result["wrong"] for result in results),
        slowest={key: slowest[key] for key in ("number", "seconds", "calls")},
        ec2_calls={"median": calls[len(calls) // 2], "most": calls[-1]},
    )


if __name__ == "__main__":
    main()
