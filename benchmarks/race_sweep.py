"""Two `up` of one name at once, from two machines, interleaved at every call that changes something.

`python -m benchmarks.race_sweep [--every N] [--scenario new|abandoned|renewed|down] [--jobs N]`

Both commands observe and plan, and halt before their first such call. Then one makes some of its calls,
the other some of its own, and so on: all ways with two switches, in both orders. No machine of the winner
may end, nor its key be lost; the loser must say whose cluster it is. In `abandoned`, a third machine's
cluster has expired there; in `renewed`, the first's; in `down`, the second command is `down`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import finish, run_sweep
from infra.key_pair import read_public
from tests.harness.cloud import CloudProcess, cloud_process
from tests.harness.runs import (
    DONE,
    FAILED,
    NAME,
    Actor,
    Run,
    defects,
    describe,
    run_down,
    run_in_process,
    run_up,
)

FAULTS = 'profile = "fast"\nvisibility_s = 2.0\n'
WISH: dict[str, Any] = {"nodes": 2, "bake": "none"}
# Who made a cluster that has expired before the race.
SCENARIOS = {"new": None, "abandoned": "third", "renewed": "first", "down": None}
_FOREIGN = "belongs to another SSH key"
# In `renewed`, the first one's group may be deleted before the second one's key shows whose the name is.
_REMOVED = "the cluster was removed in the meantime"
_TTL_S = 25 * 3600


class Schedule(NamedTuple):
    """``first`` begins, the other follows after ``before`` of its calls, for ``during`` calls of its own."""

    first: int
    before: int
    during: int
    late: bool
    """The other one observes and plans only when its turn comes."""


class Race:
    """One cloud, and the homes of two machines."""

    def __init__(self, cloud: CloudProcess, root: Path, scenario: str) -> None:
        self.cloud, self.scenario = cloud, scenario
        self.homes = {name: root / name for name in ("first", "second", "third")}

    def begin(self) -> None:
        """Create a new cloud with the scenario's resources."""
        self.cloud.new(FAULTS)
        for home in self.homes.values():
            subprocess.run(["rm", "-rf", str(home)], check=True)
        if maker := SCENARIOS[self.scenario]:
            run = run_in_process(self.cloud, self.homes[maker], run_up, WISH)
            assert run.code == DONE, run.error
            ids = [i.id for i in describe(self.cloud).alive]
            self.cloud.connect().ec2.terminate_instances(InstanceIds=ids)
            self.cloud.time.sleep(_TTL_S)

    def actor(self, number: int) -> Actor:
        home = self.homes[("first", "second")[number]]
        work = run_down if self.scenario == "down" and number else run_up
        return Actor(self.cloud, home, work, WISH, steps=True)

    def run(self, schedule: Schedule) -> tuple[list[Run], bool]:
        """Return how both ended, and whether the schedule's calls were all there."""
        self.begin()
        leader, other = schedule.first, 1 - schedule.first
        actors = {leader: self.actor(leader)}
        if not schedule.late:
            actors[other] = self.actor(other)
        fits = _steps(actors[leader], schedule.before)
        if schedule.late:
            actors[other] = self.actor(other)
        fits &= _steps(actors[other], schedule.during)
        ends = {number: actors[number].finish() for number in (leader, other)}
        self.cloud.time.sleep(10)
        return [ends[0], ends[1]], fits

    def judge(self, runs: Sequence[Run]) -> list[str]:
        """Return what is wrong after both have ended, and after everything is removed."""
        wrong = [
            f"ended with {run.code}: {run.error}" for run in runs if run.code not in (DONE, FAILED)
        ]
        wrong += self._judge_owners(runs) if self.scenario != "down" else []
        wrong += [defects(self.cloud)] if defects(self.cloud) else []
        last = run_in_process(self.cloud, self.homes["third"], run_down)
        if last.code != DONE:
            wrong.append(f"down ended with {last.code}: {last.error}")
        if left := self.cloud.left():
            wrong.append(f"left after down: {left}")
        return wrong

    def _judge_owners(self, runs: Sequence[Run]) -> list[str]:
        winners = [number for number, run in enumerate(runs) if run.code == DONE]
        if len(winners) != 1:
            return [f"{len(winners)} of the two came up: {[run.error for run in runs]}"]
        wrong, loser = [], runs[1 - winners[0]]
        truths = (_FOREIGN, _REMOVED) if self.scenario == "renewed" else (_FOREIGN,)
        if not any(truth in loser.error for truth in truths):
            wrong.append(f"the loser said: {loser.error}")
        found = describe(self.cloud)
        key = read_public(self.homes[("first", "second")[winners[0]]] / NAME / "id_ed25519")
        if [pair.public for pair in found.key_pairs] != [key]:
            wrong.append("the key in EC2 is not the winner's")
        if [i.state for i in found.instances] != ["running"] * WISH["nodes"]:
            wrong.append(f"machines: {[(i.id, i.state) for i in found.instances]}")
        before = 0 if SCENARIOS[self.scenario] is None else 1
        if (ended := self.cloud.calls()["TerminateInstances"]) > before:
            wrong.append(f"{ended - before} calls terminated machines")
        again = run_in_process(
            self.cloud, self.homes[("first", "second")[winners[0]]], run_up, WISH
        )
        if again.code != DONE:
            wrong.append(f"the winner's next up ended with {again.code}: {again.error}")
        return wrong


def _steps(actor: Actor, count: int) -> bool:
    for _ in range(count):
        if not actor.waits_for:
            return False
        actor.step()
    return True


def schedules(race: Race) -> list[Schedule]:
    """Return every way to interleave the two, as far as the calls of one alone reach."""
    counts = []
    for number in (0, 1):
        race.begin()
        actor, count = race.actor(number), 0
        while actor.waits_for:
            actor.step()
            count += 1
        assert actor.finish().code == DONE
        counts.append(count)
    return [
        Schedule(first, before, during, late)
        for first in (0, 1)
        for late in (False, True)
        for before in range(counts[first] + 1)
        for during in range(counts[1 - first] + 1)
    ]


def sweep(root: Path, scenario: str, every: int, job: int, jobs: int) -> dict[str, Any]:
    """Try this process's share of the schedules."""
    with cloud_process(root / "cloud") as cloud:
        race = Race(cloud, root, scenario)
        planned = schedules(race)
        wrong, ran = [], 0
        # A loser makes fewer calls than planned: the longer schedules repeat one that was tried.
        tried: set[Schedule] = set()
        for schedule in planned[::every][job::jobs]:
            prefix = schedule._replace(during=0)
            if prefix in tried:
                continue
            runs, fits = race.run(schedule)
            if not fits:
                tried.add(prefix)
            ran += 1
            problems = [f"{scenario}, {schedule}: {problem}" for problem in race.judge(runs)]
            print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr, flush=True)
            wrong += problems
    return {"planned": len(planned), "runs": ran, "wrong": wrong}


def main() -> None:
    results = run_sweep("benchmarks.race_sweep", __doc__, tuple(SCENARIOS), sweep)
    planned = {name: result["planned"] for name, result in results.items()}
    runs = sum(result["runs"] for result in results.values())
    wrong = [line for result in results.values() for line in result["wrong"]]
    finish(wrong, benchmark="race_sweep", schedules=planned, runs=runs)


if __name__ == "__main__":
    main()
