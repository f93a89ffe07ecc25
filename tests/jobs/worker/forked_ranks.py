"""Ranks of a tiny job as forks of a process that has already loaded torch: a run takes a second.

``python -m tests.jobs.worker.forked_ranks`` is a rank of the :class:`Run` that its argument describes.
Ranks are processes like mpirun's, and are killed as such.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs.worker.runtime.events import parse_event
from jobs.worker.training.options import TrainOptions

SHAPE = {"dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}
# So that the random states count.
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "qa_dropout": 0.1}
_REPOSITORY = Path(__file__).parents[3]


@dataclass(frozen=True)
class Run:
    """One run: each rank's options as JSON (``RANK`` is replaced by its number), and its fate.

    ``rank`` gets ``signal`` ``at`` its N-th (``step``) optimizer ``step``, in its N-th ``evaluation``, or
    when it brings a file to the ``disk`` for the N-th time; with ``full`` that is full then, and no signal
    comes. ``loss`` is what every step from N on seems to have.
    """

    options: str
    ranks: int = 2
    rank: int = 0
    at: str = ""
    step: int = 0
    signal: int = signal.SIGKILL
    loss: float | None = None
    full: bool = False
    task: str = "squad"


@dataclass(frozen=True)
class Ran:
    """``codes`` and printed ``texts`` of the ranks."""

    codes: list[int]
    texts: list[str]

    def of(self, name: str) -> list[dict[str, Any]]:
        """Return rank 0's events of a kind."""
        return events_of(self.texts[0], name)


def events_of(printed: str, name: str) -> list[dict[str, Any]]:
    every = map(parse_event, printed.splitlines())
    return [each for each in every if each and each["event"] == name]


def run_forked(runs: Sequence[tuple[TrainOptions, dict[str, Any]]]) -> list[Ran]:
    """Run one after another."""
    return [_run(Run(options.to_json(), task=options.task, **more)) for options, more in runs]


def _run(run: Run) -> Ran:
    from tests.jobs.worker.training.test_run import run_ranks

    argv = ["-m", "tests.jobs.worker.forked_ranks", json.dumps(asdict(run))]
    ended = run_ranks(_REPOSITORY, [argv] * run.ranks)
    return Ran([each.code for each in ended], [each.output for each in ended])


def _work(run: Run, rank: int) -> int:
    import torch

    from jobs.worker.tasks import TASKS
    from jobs.worker.training import between_steps, model
    from jobs.worker.training import run as job
    from jobs.worker.training.optimizer_step import Step, take_step

    gc.disable()  # like `python -m worker.tasks`
    torch.set_num_threads(1)
    model.SCRATCH_SHAPE, model.SCRATCH_DROPOUT = SHAPE, DROPOUT
    seen = {"step": 0, "disk": 0, "evaluation": 0}

    def hit(what: str) -> None:
        seen[what] += 1
        if (rank, run.at, run.step) == (run.rank, what, seen[what]):
            if run.full:
                raise OSError(28, "No space left on device")
            os.kill(os.getpid(), run.signal)

    to_disk = os.fsync

    def take(*arguments: Any) -> Step:
        assert gc.isenabled()
        hit("step")
        taken = take_step(*arguments)
        if run.loss is not None and seen["step"] >= run.step:
            return taken._replace(loss=run.loss)
        return taken

    def bring(descriptor: int) -> None:
        hit("disk")
        to_disk(descriptor)

    task = TASKS[run.task]

    class Evaluated(task):  # type: ignore[valid-type, misc]
        def evaluate(self, *arguments: Any) -> Any:
            hit("evaluation")
            return super().evaluate(*arguments)

    # As a mapping: a module does not offer to others what it imports.
    vars(between_steps)["take_step"] = vars(job)["take_step"] = take
    vars(os)["fsync"] = bring
    return job.run_task(Evaluated, task.Options.from_json(run.options.replace("RANK", str(rank))))


if __name__ == "__main__":
    _code = _work(Run(**json.loads(sys.argv[1])), int(os.environ["PMI_RANK"]))
    sys.stdout.flush()
    os._exit(_code)
