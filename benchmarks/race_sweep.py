"""Two commands with one name, from two machines, interleaved at every call that changes something.

`python -m benchmarks.race_sweep [--every N] [--scenario new|abandoned|renewed|down|…] [--jobs N]`

Both commands observe and plan, and halt before their first such call. Then one makes some of its calls,
the other some of its own, and so on: all ways with two switches, in both orders.

Two `up`: no machine of the winner may end, nor its key be lost; the loser must say whose cluster it is. In
`abandoned`, a third machine's cluster has expired there; in `renewed`, the first's.

The second command is `down` of a user without the key. Meanwhile the owner makes the cluster (`down`),
removes it and makes it again (`again`), repairs it (`repair`), or removes it as well (`downs`). `down` must
not touch what the owner made after the approval, and ends well only if nothing older is left.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import choose, finish, run_sweep
from cluster.context import Context
from infra.ec2.key_pair import read_public
from tests.harness.cloud import CloudProcess, cloud_process
from tests.harness.runs import (
    DONE,
    FAILED,
    NAME,
    Actor,
    Run,
    Work,
    defects,
    describe,
    run_down,
    run_in_process,
    run_up,
)

FAULTS = 'profile = "fast"\nvisibility_s = 2.0\n'
WISH: dict[str, Any] = {"nodes": 2, "bake": "none"}


def run_again(ctx: Context, given: Mapping[str, Any]) -> None:
    """A cluster that is removed and made again, with another key."""
    run_down(ctx, given)
    run_up(ctx, given)


class Scenario(NamedTuple):
    """What the two commands do; the cluster that ``maker`` has made before, if any, and lost machines of."""

    works: tuple[Work, Work] = (run_up, run_up)
    maker: str = ""
    lost: int = 0
    passed_s: float = 0

    @property
    def removes(self) -> bool:
        return self.works[1] is run_down


_TTL_S = 25 * 3600
SCENARIOS = {
    "new": Scenario(),
    "abandoned": Scenario(maker="third", lost=2, passed_s=_TTL_S),
    "renewed": Scenario(maker="first", lost=2, passed_s=_TTL_S),
    "down": Scenario((run_up, run_down)),
    "again": Scenario((run_again, run_down), "first"),
    "repair": Scenario((run_up, run_down), "first", lost=1),
    "downs": Scenario((run_down, run_down), "first"),
}
_FOREIGN = "belongs to another SSH key"
# In `renewed`, the first one's group may be deleted before the second one's key shows whose the name is.
_REMOVED = "the cluster was removed in the meantime"
_NEWER = "since its removal was approved"
# What a command may say when another user removes or makes the cluster meanwhile: also that a machine does
# not answer anymore, or what EC2 says is gone.
_TRUTHS = (_FOREIGN, _REMOVED, _NEWER, "no SSH", ".NotFound: ")


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
        self.cloud, self.scenario = cloud, SCENARIOS[scenario]
        self.homes = {name: root / name for name in ("first", "second", "third")}
        self.approved: set[str] = set()
        """What existed when the removal was approved, and the claims on it."""
        self.wrong: list[str] = []

    def begin(self) -> None:
        """Create a new cloud with the scenario's resources."""
        self.cloud.new(FAULTS)
        self.wrong = []
        for home in self.homes.values():
            subprocess.run(["rm", "-rf", str(home)], check=True)
        if maker := self.scenario.maker:
            run = run_in_process(self.cloud, self.homes[maker], run_up, WISH)
            assert run.code == DONE, run.error
            ids = [i.id for i in describe(self.cloud).alive][::-1]
            if lost := ids[: self.scenario.lost]:
                self.cloud.connect().ec2.terminate_instances(InstanceIds=lost)
            self.cloud.time.sleep(self.scenario.passed_s or 10)

    def actor(self, number: int) -> Actor:
        home = self.homes[("first", "second")[number]]
        actor = Actor(self.cloud, home, self.scenario.works[number], WISH, steps=True)
        if number and self.scenario.removes:
            # A group of the last two seconds is not listed yet: there is nothing to approve.
            standing = self.cloud.ask("standing") if actor.waits_for else {}
            self.approved = {*standing, *standing.values()} - {""}
        return actor

    def run(self, schedule: Schedule) -> tuple[list[Run], bool]:
        """Return how both ended, and whether the schedule's calls were all there."""
        self.begin()
        leader, other = schedule.first, 1 - schedule.first
        actors = {leader: self.actor(leader)}
        if not schedule.late:
            actors[other] = self.actor(other)
        fits = self.step(actors, leader, schedule.before)
        if schedule.late:
            actors[other] = self.actor(other)
        fits &= self.step(actors, other, schedule.during)
        ends = {number: self._finish(actors, number) for number in (leader, other)}
        self.cloud.time.sleep(10)
        return [ends[0], ends[1]], fits

    def step(self, actors: Mapping[int, Actor], number: int, count: int) -> bool:
        """Let one make its next calls; return whether it made as many."""
        for _ in range(count):
            if not (call := actors[number].waits_for):
                return False
            before = self.cloud.ask("standing") if number and self.scenario.removes else {}
            actors[number].step()
            if gone := before.keys() - self.cloud.ask("standing") if before else ():
                # A plan from before the approval may make something later, with an approved claim. A key
                # pair that its owner imports again as the group goes has no claim.
                newer = [i for i in gone if before[i] and not {i, before[i]} & self.approved]
                self.wrong += [f"{call} removed {newer}, newer than the approval"] if newer else []
        return True

    def _finish(self, actors: Mapping[int, Actor], number: int) -> Run:
        while self.step(actors, number, 1):
            pass
        run = actors[number].finish()
        if number and self.scenario.removes and run.code == DONE:
            left = sorted(self.approved & self.cloud.ask("standing").keys())
            self.wrong += [f"left after the second one's down: {left}"] if left else []
        return run

    def judge(self, runs: Sequence[Run]) -> list[str]:
        """Return what is wrong after both have ended, and after everything is removed."""
        wrong = self.wrong + [
            f"ended with {run.code}: {run.error}" for run in runs if run.code not in (DONE, FAILED)
        ]
        if self.scenario.removes:
            wrong += [
                f"ended with: {run.error}"
                for run in runs
                if run.code == FAILED and not any(truth in run.error for truth in _TRUTHS)
            ]
        else:
            wrong += self._judge_owners(runs)
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
        truths = (_FOREIGN, _REMOVED) if self.scenario.maker == "first" else (_FOREIGN,)
        if not any(truth in loser.error for truth in truths):
            wrong.append(f"the loser said: {loser.error}")
        found = describe(self.cloud)
        key = read_public(self.homes[("first", "second")[winners[0]]] / NAME / "id_ed25519")
        if [pair.public for pair in found.key_pairs] != [key]:
            wrong.append("the key in EC2 is not the winner's")
        if [i.state for i in found.instances] != ["running"] * WISH["nodes"]:
            wrong.append(f"machines: {[(i.id, i.state) for i in found.instances]}")
        before = 1 if self.scenario.lost else 0
        if (ended := self.cloud.calls()["TerminateInstances"]) > before:
            wrong.append(f"{ended - before} calls terminated machines")
        again = run_in_process(
            self.cloud, self.homes[("first", "second")[winners[0]]], run_up, WISH
        )
        if again.code != DONE:
            wrong.append(f"the winner's next up ended with {again.code}: {again.error}")
        return wrong


def schedules(race: Race) -> list[Schedule]:
    """Return every way to interleave the two, as far as the calls of one alone reach."""
    counts = []
    for number in (0, 1):
        race.begin()
        if number and not race.scenario.maker and race.scenario.removes:
            assert race.actor(0).finish().code == DONE
        actor, count = race.actor(number), 0
        while race.step({number: actor}, number, 1):
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


def sweep(
    cloud: CloudProcess, root: Path, scenario: str, every: int, job: int, jobs: int
) -> dict[str, Any]:
    """Try this process's share of the schedules."""
    race = Race(cloud, root, scenario)
    planned = schedules(race)
    wrong, ran = [], 0
    # A loser makes fewer calls than planned: the longer schedules repeat one that was tried.
    tried: set[Schedule] = set()
    for schedule in choose(planned, every)[job::jobs]:
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
    results = run_sweep("benchmarks.race_sweep", __doc__, tuple(SCENARIOS), cloud_process, sweep)
    planned = {name: result["planned"] for name, result in results.items()}
    runs = sum(result["runs"] for result in results.values())
    wrong = [line for result in results.values() for line in result["wrong"]]
    finish(wrong, benchmark="race_sweep", schedules=planned, runs=runs)


if __name__ == "__main__":
    main()
