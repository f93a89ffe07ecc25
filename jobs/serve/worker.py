"""The process that has the model, and the queue in front of it. The server itself needs no torch."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jobs.serve import Answer

MOST_ROWS, MOST_WAITING = 32, 4 * 2048
"""Rows that are predicted together, and rows of all requests that may wait for their answers."""


class FullError(Exception):
    """Too many rows are waiting."""


class LostError(Exception):
    """The process that has the model has ended; another one is starting."""


class UnloadableError(Exception):
    """The model can't be loaded; the message says why."""


class Model(NamedTuple):
    """The model's task, and the columns that it reads; whether its scores are only for ranking.

    ``settings`` are the options of `predict` that have an effect on it.
    """

    task: str
    inputs: tuple[str, ...]
    is_ranking: bool = False
    settings: tuple[str, ...] = ()


Numbered = Sequence[tuple[int, Mapping[str, Any]]]
"""Rows with their numbers in their request, from 1."""
Settings = Mapping[str, Any]


class _Waiting(NamedTuple):
    rows: Numbered
    settings: Settings
    answer: asyncio.Future[list[Answer]]


def _run(pipe: Connection, folder: str, threads: int | None) -> None:
    """Load the model, and answer what comes through the pipe: rows with settings, and None for a description.

    Ctrl-C and systemd signal all processes: the server still answers what has begun, and ends this one.
    """
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    import torch  # noqa: PLC0415 - an optional package

    from jobs.serve.rows import read_row, to_answer  # noqa: PLC0415
    from jobs.worker.corpus.shards import trained_columns  # noqa: PLC0415
    from jobs.worker.tasks.predict import load_trained, predict_rows  # noqa: PLC0415
    from jobs.worker.tasks.score import is_ranking  # noqa: PLC0415

    torch.set_num_threads(threads or within_quota(torch.get_num_threads()))
    failure: Exception | None = None
    try:
        task, loaded = load_trained(folder)
        trained = trained_columns(folder)
    except Exception as error:  # of many libraries
        failure = UnloadableError(" ".join(str(error).split()) or repr(error))
    with suppress(EOFError):  # the server has ended
        while True:
            asked = pipe.recv()
            if failure:
                pipe.send(failure)
                continue
            if asked is None:
                known = tuple(task.inputs), is_ranking(loaded), tuple(task.settings)
                pipe.send(Model(task.name, *known))
                continue
            rows, settings = asked
            loaded = loaded._replace(settings=settings)
            numbered = [read_row(task, trained, number, row) for number, row in rows]
            try:
                answers = zip(predict_rows(task, loaded, numbered), numbered, strict=True)
                found: object = [to_answer(task, loaded, *each) for each in answers]
            except Exception as error:
                found = RuntimeError(f"{type(error).__name__}: {error}")
            pipe.send(found)


def within_quota(cores: int, groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many cores a container's CPU quota allows, at most ``cores``.

    https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files
    """
    files = (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"])  # of versions 2 and 1
    for names in files:
        with suppress(OSError, ValueError):  # such as "max 100000", or -1
            quota, period = map(int, " ".join((groups / n).read_text() for n in names).split())
            if quota > 0:
                return min(cores, max(1, quota // period))
    return cores


class Worker:
    """Predicts the rows of requests that wait at the same time together, in another process."""

    def __init__(self, folder: Path, threads: int | None = None) -> None:
        self._arguments = str(folder), threads
        self._waiting: deque[_Waiting] = deque()
        self._wake, self._turn = asyncio.Event(), asyncio.Lock()
        self.model: Model | None = None
        """What the model is, while it is loaded."""
        self._is_over, self.restarts = False, 0
        self.waiting = 0
        """The rows of all requests that are not answered yet."""
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        # Without this end, reading fails if the process ends, also within an answer, or does not start.
        with other:
            process = context.Process(target=_run, args=(other, *self._arguments), daemon=True)
            process.start()
        self._process = process

    async def ask(
        self, rows: Sequence[Mapping[str, Any]], settings: Settings = MappingProxyType({})
    ) -> list[Answer]:
        """Return the rows' predictions. Raises :class:`FullError` or :class:`LostError`."""
        if self.model is None:
            raise LostError
        if self.waiting + len(rows) > MOST_WAITING:
            raise FullError
        found, numbered = list[Answer](), [*enumerate(rows, start=1)]
        self.waiting += len(rows)
        try:
            for first in range(0, len(rows), MOST_ROWS):
                answer: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
                part = numbered[first : first + MOST_ROWS]
                self._waiting.append(_Waiting(part, {**settings}, answer))
                self._wake.set()
                found += await answer
        finally:
            self.waiting -= len(rows)
        return found

    async def work(self) -> None:
        """Answer what waits, until canceled. Raises :class:`UnloadableError`."""
        try:
            await self._load()
            while True:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), 1)
                self._wake.clear()
                if not self._process.is_alive():
                    with suppress(LostError):
                        await self._call(None)
                    await self._load()
                while self._waiting:
                    await self._answer(self._take())
        finally:
            self.stop()

    def stop(self) -> None:
        """End the process; what it computes is lost."""
        self._is_over = True
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.join()

    def _take(self) -> list[_Waiting]:
        taken = [self._waiting.popleft()]
        settings = taken[0].settings
        # What is drawn at random for a row depends on the rows of its batch.
        while self._waiting and self._waiting[0].settings == settings:
            if settings.get("temperature") or sum(len(each.rows) for each in taken) >= MOST_ROWS:
                break
            taken.append(self._waiting.popleft())
        return [each for each in taken if not each.answer.cancelled()]

    async def _answer(self, taken: Sequence[_Waiting]) -> None:
        rows = [row for each in taken for row in each.rows]
        try:
            found = await self._call((rows, taken[0].settings)) if rows else []
        except LostError as error:
            _fail([*taken, *self._waiting], error)
            self._waiting.clear()
            await self._load()
            return
        except Exception as error:
            if len(taken) == 1:
                _fail(taken, error)
            else:
                for each in taken:  # the others are not at fault
                    await self._answer([each])
            return
        for each in taken:
            answers, found = found[: len(each.rows)], found[len(each.rows) :]
            if not each.answer.done():  # its client may have left
                each.answer.set_result(answers)

    async def _load(self) -> None:
        while self.model is None:
            try:
                self.model = await self._call(None)
            except LostError:
                await asyncio.sleep(1)

    async def _call(self, message: tuple[Numbered, Settings] | None) -> Any:
        async with self._turn:
            try:
                found = await asyncio.to_thread(self._exchange, message)
            except (EOFError, OSError) as error:
                self.model, self.restarts = None, self.restarts + 1
                if not self._is_over:
                    self._end()
                    with suppress(OSError):  # without memory: the next call tries again
                        self._start()
                raise LostError from error
        if isinstance(found, Exception):
            raise found
        return found

    def _exchange(self, message: tuple[Numbered, Settings] | None) -> Any:
        self._pipe.send(message)
        return self._pipe.recv()


def _fail(waiting: Sequence[_Waiting], error: Exception) -> None:
    for each in waiting:
        if not each.answer.done():
            each.answer.set_exception(error)
