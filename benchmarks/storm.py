"""Create/destroy cycles under random faults: `up`, then `down`, must always leave nothing.

`python -m benchmarks.storm [--runs 200] [--seed N] [--jobs N]`

Every run is under the faults profile `unkind` (slow, throttled, eventually consistent, cold disks, old
consoles, no role for spot) and the printed IAM policy, whose conditions see new tags late. Random faults:
zones without capacity, calls that fail or lose their answer, a machine that never boots, never starts its
system, dies, has no SSH or no AMX, spot, a second guard, and a network that lets nothing through: no route,
Block Public Access, or port 22 blocked.

Each `up` must end with a verified cluster or a clear failure. Because of the network, no machine is bought
again or terminated, and `up` continues when it is repaired. `down` in another account changes nothing. No key
is lost before the last `down`, which leaves nothing, counted in the cloud itself. In two of three runs, the
nodes are held to the last, which a job with a limit moves as far as a random --budget allows: no machine
with a timer or a second guard may outlive the latest end, and the bill of those that end by themselves may
be no more than --budget, by an independent meter (tests/cloud/meter.py). In the third, a job with a random
--budget waits in the queue and runs as long as it may, on some of the nodes: until its end, and as long as
it keeps all nodes, these may not cost more, also if one is lost and replaced.
`--seed 7 --only 13` repeats one run.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.common import finish, run_shares
from cluster.context import Context
from cluster.lifecycle.deadline import raise_latest
from infra.cost.prices import Price, table_prices
from infra.ec2.cluster_record import limit_record
from infra.ec2.inventory import describe_inventory
from infra.errors import UsageError
from infra.iam.policy import build_policy
from infra.instance_types import DEFAULT_INSTANCE_TYPE, TABLE_REGION
from infra.lifetime import AFTER
from infra.spec import ClusterOptions, default_throughput
from jobs.cli.shared.job_limit import JobLimit
from jobs.worker.spec import Ending
from jobs.worker.supervisor.deadline import SAVE_S, Deadline
from tests.harness.cloud import CloudProcess, cloud_process
from tests.harness.runs import (
    BROKEN,
    DONE,
    NAME,
    Run,
    defects,
    run_down,
    run_in_process,
    run_limited_up,
)

ZONES = [f"us-east-1{letter}" for letter in "abcdef"]
FATES = ("never-boots", "no-guest", "dies", "no-ssh", "no-amx", "impaired")
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


TYPES = ("r7iz.metal-16xl", "m7i.metal-24xl")
# Of these, EC2's calls say that the first two let nothing through: nothing is bought.
NETWORKS = (
    "internet_gateway = false",
    'block_public_access = "block-ingress"',
    'ssh = "blocked"',
)
SEEN = NETWORKS[:2]
OTHER_ACCOUNT = "210987654321"
_KINDS = ("instances", "security_groups")
_LISTED = 1.1
"""The prices of the faults profile `unkind`, compared to the table's."""
_LONGEST = ClusterOptions().ttl + ClusterOptions().grace


def make_faults(dice: random.Random, policy: Path, network: str) -> str:
    """Return one run's faults file."""
    lines = [
        f"seed = {dice.randrange(1 << 30)}",
        'profile = "unkind"',
        f"boot_s = {dice.choice([0, 0.3, 20])}",
        f"image_s = {dice.choice([0, 0.3, 60])}",
        f"visibility_s = {dice.uniform(0, 4):.1f}",
        '[[throttle]]\naction = "*"\nrate = 0.3',
        f'[iam]\npolicy = "{policy}"\ntag_delay_s = {dice.uniform(0, 4):.1f}',
    ]
    if network:
        # Nothing else, so that each purchase is the network's fault.
        return "\n".join([*lines, f"[network]\n{network}"]) + "\n"
    for zone in dice.sample(ZONES, dice.randint(0, len(ZONES))):
        free, group = dice.choice([0, 0, 1, 2]), dice.choice(["true", "false"])
        lines.append(f'[[capacity]]\nzone = "{zone}"\nfree = {free}\ngroup = {group}')
    for _ in range(dice.randint(0, 2)):
        lines.append(f'[[machine]]\nn = {dice.randint(0, 4)}\nfate = "{dice.choice(FATES)}"')
    for action in dice.sample(CALLS, dice.randint(0, 2)):
        effect = dice.choice(["true", "false"])
        lines.append(
            f'[[error]]\naction = "{action}"\ncode = "InternalError"\ntimes = 1\neffect = {effect}'
        )
    return "\n".join(lines) + "\n"


def make_request(dice: random.Random) -> dict[str, Any]:
    """Return the cluster to request in one run."""
    request: dict[str, Any] = {"nodes": dice.randint(1, 5)}
    if dice.random() < 0.3:
        request["instance_types"] = TYPES
    if dice.random() < 0.3:
        request["market"] = dice.choice(["spot", "spot-or-on-demand"])
        request["max_price"] = dice.choice([None, 4.0])
    request["second_guard"] = dice.random() < 0.3
    request["bake"] = dice.choice(["head", "none"])
    hours = dice.uniform(_LONGEST.total_seconds() / 3600, 24)
    request["budget"] = round(usd_per_hour(request) * hours + 0.01, 2)
    return request


def usd_per_hour(request: Mapping[str, Any]) -> float:
    """Return the highest price of a cluster's nodes, from the cloud's price list."""
    types = request.get("instance_types", (DEFAULT_INSTANCE_TYPE,))
    table = table_prices(TABLE_REGION, types)
    listed = [
        {name: replace(price, usd=price.usd * _LISTED) for name, price in prices.items()}
        for prices in (table.machines, table.gp3)
    ]
    prices = replace(table, machines=listed[0], gp3=listed[1])
    defaults = ClusterOptions(volume_throughput=default_throughput(types)).model_dump()
    node = prices.most(types, {**defaults, **request})
    assert node
    return node.usd * int(request["nodes"])


def run_priced_up(ctx: Context, given: Mapping[str, Any]) -> None:
    """Do what `up --budget` does where machines have a price."""
    run_limited_up(
        ctx, given, lambda record, old: limit_record(record, old, usd_per_hour(record.dearest))
    )


def run_limited_job(ctx: Context, _: Mapping[str, Any]) -> None:
    """Move the latest end as a job with --budget does, and try to move it further."""
    record = describe_inventory(ctx.clients.ec2, NAME, ("security_groups",)).record
    assert record
    assert record.bound
    raise_latest(ctx, record.bound)
    try:
        raise_latest(ctx, record.bound + timedelta(seconds=1))
    except UsageError:
        return
    raise AssertionError("--budget did not limit it")


def run_once(cloud: CloudProcess, home: Path, seed: int, number: int) -> dict[str, Any]:
    """Do one run; ``wrong`` is empty if it passed."""
    dice = random.Random(f"{seed}-{number}")
    subprocess.run(["rm", "-rf", str(home)], check=True)
    policy = cloud.root / "policy.json"
    policy.write_text(json.dumps(build_policy(instance_types=TYPES, second_guard=True)))
    network = dice.choice(NETWORKS) if dice.random() < 0.25 else ""
    faults, request = make_faults(dice, policy, network), make_request(dice)
    cloud.new(faults)
    start = time.monotonic()
    up = run_in_process(cloud, home, run_priced_up, request)
    calls = sum(cloud.calls().values())
    wrong, spent = [], 0.0
    if up.code == BROKEN or up.was_killed or (up.code != DONE and not up.error.strip()):
        wrong.append(f"up: {up.code}: {up.error}")
    if network:
        wrong += continue_after(cloud, home, network, faults, request, up)
    if number % 3 == 1 and up.code == DONE:
        late, spent = run_job(cloud, home, request, dice)
        wrong += late
    elif number % 3 != 1:
        late, spent = outlive(cloud, home, request, is_up=up.code == DONE)
        wrong += late
    wrong += visit_from_elsewhere(cloud, home, faults)
    down = run_in_process(cloud, home, run_down)
    if down.code != DONE:
        wrong.append(f"down: {down.code}: {down.error}")
    if left := cloud.left():
        wrong.append(f"left: {left}")
    if flaw := defects(cloud):
        wrong.append(flaw)
    reason = up.error.splitlines()[0] if up.error else ""
    result = {"number": number, "ok": up.code == DONE, "reason": reason, "calls": calls}
    seconds = time.monotonic() - start
    return {
        **result,
        "network": network,
        "seconds": seconds,
        "wrong": wrong,
        "faults": faults,
        "spent": spent,
    }


def continue_after(
    cloud: CloudProcess, home: Path, network: str, faults: str, request: dict[str, Any], up: Run
) -> list[str]:
    """Mend the network and run `up` again; return what was wrong before and after."""
    bought, terminated = cloud.launched(), cloud.calls()["TerminateInstances"]
    cloud.faults(faults.partition("[network]")[0])
    again = run_in_process(cloud, home, run_priced_up, request)
    in_all = bought + cloud.launched()
    checks = {
        "verified through a closed network": up.code == DONE,
        "the network's machines were terminated": terminated > 0,
        f"{bought} machines bought where EC2 says that none can be reached": bought
        and network in SEEN,
        f"{in_all} machines bought for {request['nodes']}": in_all > request["nodes"],
        f"again: {again.code}: {again.error}": again.code != DONE,
    }
    return [text for text, is_wrong in checks.items() if is_wrong]


def outlive(
    cloud: CloudProcess, home: Path, request: dict[str, Any], *, is_up: bool
) -> tuple[list[str], float]:
    """Let the time pass with all nodes held to the last.

    Return what lived longer or cost more, and the share of the budget that was spent.
    """
    ec2, wrong = cloud.connect().ec2, []
    if is_up:
        moved = run_in_process(cloud, home, run_limited_job)
        # A throttled call may have stopped it halfway, which must not cost more either.
        wrong = [f"limited job: {moved.error}"] if moved.code == BROKEN else []
    record = describe_inventory(ec2, NAME, ("security_groups",)).record
    if record is None:
        return wrong, 0.0
    cloud.ask("lives")
    # In two steps, so that ends are exact: the timers' and the second guard's.
    for end in (record.latest, record.latest + AFTER):
        cloud.time.sleep(max(0.0, (end - cloud.time.now()).total_seconds() + 1))
        found = describe_inventory(ec2, NAME, ("instances",))
    lives = cloud.ask("lives")
    # A machine that never boots has no timer.
    late = [i.id for i in found.alive if i.id in lives or request["second_guard"]]
    late += [id_ for id_, life in lives.items() if life[-1] > record.latest.timestamp() + 60]
    alive = {machine.id for machine in found.alive}
    usd = sum(usd for id_, usd in cloud.ask("bill").items() if id_ not in alive)
    most = request["budget"]
    checks = {
        f"outlived the latest end: {late}": bool(late),
        f"${usd:.2f} for at most ${most:.2f}": usd > most,
    }
    return wrong + [text for text, is_wrong in checks.items() if is_wrong], usd / most


def run_job(
    cloud: CloudProcess, home: Path, request: dict[str, Any], dice: random.Random
) -> tuple[list[str], float]:
    """Run a job with a random budget after a random time in the queue.

    Return what was wrong, and the share of the budget that was spent.
    """
    if held := dice.random() < 0.5:  # by another job, as long as the cluster's --budget allows
        run_in_process(cloud, home, run_limited_job)
    found, now = describe_inventory(cloud.connect().ec2, NAME, _KINDS), cloud.time.now()
    record, ids = found.record, [machine.id for machine in found.alive]
    assert record
    assert record.bound
    nodes, used = len(ids), dice.randint(1, len(ids))
    price = Price(usd_per_hour(request) / request["nodes"], "")
    hours = dice.uniform(0.06, (record.bound - now).total_seconds() / 3600)
    limit = JobLimit(record, now, nodes, price, budget=price.usd * used * hours)
    limit.check(used)

    def move(ctx: Context, _: Mapping[str, Any]) -> None:
        raise_latest(ctx, limit.latest(used))

    moved = run_in_process(cloud, home, move)
    wrong = [f"job: {moved.error}"] if moved.code == BROKEN else []
    after = describe_inventory(cloud.connect().ec2, NAME, _KINDS).record
    assert after
    cloud.ask("lives")
    start, over = cloud.time.now().timestamp(), after.expires.timestamp()
    first = start + dice.uniform(0, after.latest.timestamp() - start) * held
    seconds = limit.time(used).total_seconds()
    ending = Ending(max_time_s=seconds, budget=limit.budget or 0, paid_node_s=limit.paid_node_s)
    deadline = Deadline(ending, nodes, [(first, used)])
    deadline.take(" ".join(map(str, after.lifetime.seconds)))
    end = max(first, min(first + deadline.longest_s() + SAVE_S, deadline.expires or over))

    def bill(at: float) -> dict[str, float]:
        cloud.time.sleep(max(0.0, at - cloud.time.now().timestamp()))
        describe_inventory(cloud.connect().ec2, NAME, _KINDS)
        return dict(cloud.ask("bill"))

    # If it moved the nodes' end, it keeps all of them until then, because nobody fetches its results.
    keeps = after.latest.timestamp() if after.latest > record.latest else end
    own, marks = ids[:used], [bill(first)]
    if dice.random() < 0.5 and first < end:  # it loses a node, which `up` replaces
        bill(dice.uniform(first, end))
        cloud.connect().ec2.terminate_instances(InstanceIds=[own[0]])
        again = run_in_process(cloud, home, run_priced_up, request)
        wrong += [f"replacing: {again.error}"] if again.code == BROKEN else []
        # Not those that `up` bought in vain.
        alive = describe_inventory(cloud.connect().ec2, NAME, _KINDS).alive
        own += [machine.id for machine in alive if machine.id not in ids]
    marks += [bill(max(first, min(end, over))), bill(max(first, over, keeps))]
    if keeps <= over:
        marks[2] = marks[1]
    usd = sum(marks[1][id_] - marks[0].get(id_, 0.0) for id_ in own)
    usd += sum(marks[2][id_] - marks[1].get(id_, 0.0) for id_ in {*own, *ids})
    most = limit.budget or 0.0
    for later in (1, 60):  # the machines end, then their disks
        bill(after.latest.timestamp() + AFTER.total_seconds() + later)
    spent = round(usd / most, 6)
    return wrong + [f"${usd:.2f} for a job's ${most:.2f}"] * (spent > 1), spent


def visit_from_elsewhere(cloud: CloudProcess, home: Path, faults: str) -> list[str]:
    """Run `down` in another account; return what it changed."""
    repaired = faults.partition("[network]")[0]
    before = sorted(cloud.left())
    cloud.faults(f'account = "{OTHER_ACCOUNT}"\n{repaired}')
    run = run_in_process(cloud, home, run_down)
    cloud.faults(repaired)
    checks = {
        f"elsewhere: {run.code}: {run.error}": run.code != DONE,
        "removed from another account": sorted(cloud.left()) != before,
        "the key is lost": any(id_.startswith("i-") for id_ in before)
        and not (home / NAME / "id_ed25519").exists(),
    }
    return [text for text, is_wrong in checks.items() if is_wrong]


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
        budget_spent_percent=100 * max(result["spent"] for result in results),
        closed_networks=sum(bool(result["network"]) for result in results),
        clear_failures=sum(not result["ok"] and not result["wrong"] for result in results),
        slowest={key: slowest[key] for key in ("number", "seconds", "calls")},
        ec2_calls={"median": calls[len(calls) // 2], "most": calls[-1]},
    )


if __name__ == "__main__":
    main()
