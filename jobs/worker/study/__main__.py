"""``python -m worker.study TASK PLAN OPTIONS [--resume]``: one rank of a study.

PLAN is a :class:`.plan.StudyPlan` as JSON; OPTIONS are those that all trials share. Every rank runs one trial
after another, each in its own process on the rank's cores, as a training run with one rank. Rank 0
serves the :class:`.coordinator.Coordinator` to all of them over XML-RPC. Then the best trial's output becomes
that of the job.

Exit code 1 is a failure, and 143 a stop by SIGTERM; the trials that it interrupted run again after a resume.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..pool.rank import PoolRank
from ..pool.stop import Stop
from ..runtime.checkpoint_names import CHECKPOINTS, newest, step_of
from ..runtime.output import prepare_output, state_folder
from ..runtime.process import STOPPED, leave
from ..tasks import TASKS
from ..training.options import NEVER
from .plan import STUDY, StudyPlan
from .trials import TrialRunner

_UNSEEN = ("eval", "eval_fraction")


def main() -> int:
    """Run this rank's part of the study; returns its exit code."""
    task, plan, options, *more = sys.argv[1:]
    # A trial that is to end would only save a checkpoint that nothing needs: it is killed.
    rank = PoolRank("study", Stop())

    def work() -> int:
        shared = share_options(TASKS[task].Options.from_json(options))
        state = state_folder(Path(shared.output))
        mark = rank.events.mark
        runner = TrialRunner(rank.identity.rank, shared, rank.remote, rank.stop, state, mark)
        if rank.identity.rank:
            return rank.follow(runner.run_all)
        studied = StudyPlan.from_fields(json.loads(plan))
        return lead(studied, runner, rank, resume="--resume" in more)

    return rank.run(work)


def share_options(options: Any) -> Any:
    """Return the options that all trials share: of a run with one rank and no checkpoints."""
    changed: dict[str, Any] = {"backend": "gloo", "checkpoint_every": NEVER}
    if options.eval_every == "auto" and any(getattr(options, name, None) for name in _UNSEEN):
        changed["eval_every"] = "epoch"  # it pays: bad trials end early
    return replace(options, **changed)


def lead(plan: StudyPlan, runner: TrialRunner, rank: PoolRank, *, resume: bool) -> int:
    """Run rank 0: the coordinator beside its own trials, and the study's results."""
    from .coordinator import Coordinator, restore

    options, state, events = runner.options, runner.state, rank.events
    prepare_output(Path(options.output), resume=resume)
    shutil.rmtree(state / STUDY, ignore_errors=True)
    has_state = resume and restore(state)
    events.emit("phase", name="study")
    coordinator = Coordinator(plan, options, state, events, rank.identity.size)
    if has_state:
        events.note(f"{len(coordinator.ended())} of {plan.trials} trials have ended before")
    if rank.lead(coordinator, runner.run_all):
        return coordinator.finish(Path(options.output))
    coordinator.save()
    if name := newest((state / CHECKPOINTS).glob("*")):
        events.emit("stopped", step=step_of(name), total=plan.trials, checkpoint=name)
    return STOPPED


if __name__ == "__main__":
    # Optuna, after the stack's packages: it replaces none.
    sys.path.append(str(Path("packages").absolute()))
    leave(main())
