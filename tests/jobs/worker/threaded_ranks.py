"""Ranks as threads of one process."""

from __future__ import annotations

import importlib
import io
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch.distributed as dist
from transformers import PreTrainedModel

from jobs.worker.runtime.context import Hardware, RankContext, RankFacts
from jobs.worker.runtime.events import Events
from jobs.worker.runtime.pinning import RankPlacement
from jobs.worker.runtime.precision import Precision
from jobs.worker.runtime.process import LocalPlace, RankIdentity
from jobs.worker.runtime.ranks import Ranks, join
from jobs.worker.tasks import TASKS
from jobs.worker.training.batches import TrainingRun
from jobs.worker.training.run import train_task

T = TypeVar("T")
TIMEOUT = 60
# torch's compiler imports it, and replaces distutils while it does: an AssertionError if another thread
# imports distutils just then.
with suppress(ImportError):
    importlib.import_module("setuptools")


class Table:
    """The ranks' values, with a row for each exchange."""

    def __init__(self, size: int) -> None:
        self.rows: list[list[Any]] = []
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class ThreadedRank(Ranks):
    """A rank that exchanges values with the others through a table."""

    table: Table
    rounds: list[None]

    def gather(self, value: Any) -> list[Any]:
        number = len(self.rounds)
        self.rounds.append(None)
        with self.table.lock:
            while len(self.table.rows) <= number:
                self.table.rows.append([None] * self.size)
            self.table.rows[number][self.rank] = value
        self.table.barrier.wait()
        return list(self.table.rows[number])

    def gather_later(self, numbers: Any) -> Callable[[], list[Any]]:
        return lambda: self.gather(numbers)

    def share(self, value: Any) -> Any:
        return self.gather(value)[0]


def session(
    options: Any, ranks: Ranks, said: TextIO | None = None, dtype: str = "fp32", **more: Any
) -> RankContext[Any]:
    """Return what a rank's task gets; its events go to ``said``."""
    events = Events(ranks.rank, said or io.StringIO())
    return RankContext(options, ranks, events, Precision(dtype, ""), **more)


@contextmanager
def loading_in_turn() -> Iterator[None]:
    """Let threads load their models in turn: transformers meanwhile replaces ``tie_weights`` for all of them.

    Two at the same time would restore each other's replacement, and no later model of this process would
    be tied.
    """
    load, lock = vars(PreTrainedModel)["from_pretrained"], threading.RLock()
    tie_weights = PreTrainedModel.tie_weights

    def load_alone(cls: Any, *args: Any, **named: Any) -> Any:
        with lock:
            return load.__func__(cls, *args, **named)

    PreTrainedModel.from_pretrained = classmethod(load_alone)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = load
    assert PreTrainedModel.tie_weights is tie_weights


def run_threaded(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """Return each rank's result, in rank order."""
    table = Table(size)
    ranks = [
        ThreadedRank(
            RankIdentity(rank, size), "gloo", "test", None, LocalPlace(), table=table, rounds=[]
        )
        for rank in range(size)
    ]

    def one(rank: Ranks) -> T:
        try:
            return work(rank)
        except BaseException:
            table.barrier.abort()
            raise

    with loading_in_turn(), ThreadPoolExecutor(size) as pool:
        running = [pool.submit(one, rank) for rank in ranks]
    failures = [error for each in running if (error := each.exception())]
    # The barrier also breaks for ranks that have already arrived: theirs come last.
    for error in sorted(failures, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [each.result() for each in running]


def load_run(task: Any, size: int = 1, said: TextIO | None = None, **more: Any) -> TrainingRun:
    """Return the last rank's run of a task before its first step; rank 0's events go to ``said``."""

    def work(ranks: Ranks) -> TrainingRun:
        own = task if ranks.first else type(task)(task.options)
        context = session(task.options, ranks, said if ranks.first else None, **more)
        data = own.read(lambda _: None)
        loaded = own.load(context, data)
        return TrainingRun(context, own, loaded, own.prepare(context, loaded, data.train))

    return run_threaded(size, work)[-1]


def train_alone(options: Any, output: Path, said: TextIO | None = None) -> Mapping[str, Any]:
    """Train on one rank, which is this process, and return the results."""
    place = RankPlacement(None, 1, None)
    here = Hardware(RankFacts(0, "here", 1, 1, 1, None, place), frozenset())
    try:
        with join("gloo", {}) as ranks:
            context = session(options, ranks, said, output=output, hardware=[here])
            found = train_task(TASKS[options.task](options), context)
    finally:
        if dist.is_initialized():  # after a failure, it would end with the process
            dist.destroy_process_group()
    assert found is not None
    return found
