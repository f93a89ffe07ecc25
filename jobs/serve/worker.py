"""The process that has the model, and the queue in front of it. The server itself needs no torch."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

MOST_ROWS, MOST_WAITING = 32, 1024
"""Rows that are predicted together, and rows that may wait."""
Answer = dict[str, Any] | str
"""A row's prediction, or why there is none."""


class FullError(Exception):
    """Too many rows are waiting."""


class LostError(Exception):
    """The process that has the model has ended; another one is starting."""


class UnloadableError(Exception):
    """The model can't be loaded; the message says why."""


class Model(NamedTuple):
    """What the server says of the model: its task, and what it reads of a row."""

    task: str
    inputs: tuple[str, ...]


Numbered = Sequence[tuple[int, Mapping[str, Any]]]
"""Rows with their numbers in their request, from 1."""


class _Waiting(NamedTuple):
    rows: Numbered
    answer: asyncio.Future[list[Answer]]


_loaded: Any = None


def _load(folder: str, threads: int | None) -> None:
    """Load the model in the process that has it."""
    global _loaded
    import torch  # noqa: PLC0415 - an optional package

    from jobs.worker.tasks.predict import load_trained  # noqa: PLC0415

    if threads:
        torch.set_num_threads(threads)
    try:
        _loaded = load_trained(folder)
    except Exception as error:  # of many libraries
        _loaded = UnloadableError(" ".join(str(error).split()) or repr(error))


def _describe() -> Model:
    if isinstance(_loaded, Exception):
        raise _loaded
    task, _ = _loaded
    return Model(task.name, tuple(task.inputs))


def _predict(rows: Numbered) -> list[Answer]:
    from jobs.worker.tasks.predict import predict_rows  # noqa: PLC0415
    from jobs.worker.training.text_task import Row  # noqa: PLC0415

    numbered = [Row(f"row {number}", row) for number, row in rows]
    task, loaded = _loaded
    return list(predict_rows(task, loaded, numbered))


class Worker:
    """Predicts the rows of requests that wait at the same time together, in another process."""

    def __init__(self, folder: Path, threads: int | None = None) -> None:
        self._arguments = str(folder), threads
        self._waiting: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._pool = self._start()
        self.restarts = 0

    def _start(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, context, initializer=_load, initargs=self._arguments)

    @property
    def waiting(self) -> int:
        """The number of rows that wait."""
        return sum(len(each.rows) for each in self._waiting)

    async def describe(self) -> Model:
        """Return what the model is, when it is loaded.

        Raises :class:`UnloadableError`, or :class:`LostError` if its process has ended.
        """
        found: Model = await self._call(_describe)
        return found

    async def ask(self, rows: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Return the rows' predictions. Raises :class:`FullError` or :class:`LostError`."""
        if self.waiting and self.waiting + len(rows) > MOST_WAITING:
            raise FullError
        found, numbered = list[Answer](), [*enumerate(rows, start=1)]
        for first in range(0, len(rows), MOST_ROWS):
            answer: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
            self._waiting.append(_Waiting(numbered[first : first + MOST_ROWS], answer))
            self._wake.set()
            found += await answer
        return found

    async def work(self) -> None:
        """Answer what waits, until canceled."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    await self._answer(self._take())
        finally:
            self.stop()

    def stop(self) -> None:
        """End the process; what it computes is lost."""
        for process in list(self._pool._processes.values()):
            process.terminate()
        self._pool.shutdown(cancel_futures=True)

    def _take(self) -> list[_Waiting]:
        taken = [self._waiting.popleft()]
        while self._waiting and sum(len(each.rows) for each in taken) < MOST_ROWS:
            taken.append(self._waiting.popleft())
        return [each for each in taken if not each.answer.cancelled()]

    async def _answer(self, taken: Sequence[_Waiting]) -> None:
        rows = [row for each in taken for row in each.rows]
        try:
            found = await self._call(_predict, rows) if rows else []
        except Exception as error:
            for each in taken:
                if not each.answer.done():
                    each.answer.set_exception(error)
            return
        for each in taken:
            answers, found = found[: len(each.rows)], found[len(each.rows) :]
            if not each.answer.done():  # its client may have left
                each.answer.set_result(answers)

    async def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, function, *arguments
            )
        except BrokenProcessPool as error:
            self._pool, self.restarts = self._start(), self.restarts + 1
            raise LostError from error
