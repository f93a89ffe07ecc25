"""The process that has the model may end at any time, also within an answer.

That process imports this module, so what takes long to import is imported within its tests.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import chain, repeat
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from infra.errors import JobError
from jobs.serve import TOKENS
from jobs.serve import worker as module
from jobs.serve.worker import FullError, LostError, Model, UnloadableError, Worker, within_quota
from jobs.worker.tasks import TASKS
from jobs.worker.training.task import Loaded
from jobs.worker.training.text_task import Row


def end_within_an_answer(pipe: Connection, folder: str, _: int | None) -> None:
    """The first process ends in the middle of its first answer; the next one works."""
    while (asked := pipe.recv()) is None:
        pipe.send(Model("embed", ("text",)))
    mark = Path(folder, "mark")
    if not mark.exists():
        mark.touch()
        os.write(pipe.fileno(), struct.pack("!i", 1000) + b"x" * 10)
        os._exit(1)
    pipe.send([{"row": number} for number, _ in asked[0]])
    pipe.recv()


def test_a_container_has_as_many_threads_as_its_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    assert within_quota(64, tmp_path) == 64
    for quota, cores in {"200000": 2, "-1": 64}.items():  # version 1 of cgroups
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
        assert within_quota(64, tmp_path) == cores
    for quota, cores in {"350000": 3, "50000": 1, "9900000": 64, "max": 64}.items():
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        assert within_quota(64, tmp_path) == cores


def fail_for_odd_rows(pipe: Connection, folder: str, _: int | None) -> None:
    while True:
        rows, settings = pipe.recv() or ((), {})
        is_odd = rows and any("odd" in row for _, row in rows)
        together = {"together": len(rows), **settings} if settings else {}
        found = [{"row": number, **together} for number, _ in rows]
        pipe.send(RuntimeError("odd") if is_odd else found)


@asynccontextmanager
async def working(worker: Worker) -> AsyncIterator[None]:
    """Have a worker answer what waits."""
    task = asyncio.create_task(worker.work())
    yield
    task.cancel()
    await asyncio.wait([task])


async def ask_all(
    folder: Path, *requests: list[dict[str, Any]], settings: Iterable[dict[str, Any]] = ()
) -> list[Any]:
    """What each request gets, an answer or an error, if all arrive before the first is computed."""
    worker = Worker(folder)
    await worker._load()
    chosen = chain(settings, repeat({}))
    asked = [worker.ask(rows, each) for rows, each in zip(requests, chosen, strict=False)]
    async with working(worker):
        return await asyncio.gather(*asked, return_exceptions=True)


def test_a_request_that_fails_or_has_other_settings_is_computed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_run", fail_for_odd_rows)

    first, failed, last = asyncio.run(ask_all(tmp_path, [{}], [{"odd": 1}], [{}, {}]))
    assert (first, last) == ([{"row": 1}], [{"row": 1}, {"row": 2}])
    assert isinstance(failed, RuntimeError)
    short, hot = {"max_new_tokens": 2}, {"temperature": 0.5}  # batches change what is random
    settings: list[dict[str, Any]] = [short, short, {}, hot, hot]
    rows: list[dict[str, Any]] = [{}]
    answers = asyncio.run(ask_all(tmp_path, *[rows] * len(settings), settings=settings))
    both, hot = {"together": 2, "max_new_tokens": 2}, {"together": 1, "temperature": 0.5}
    assert answers == [[{"row": 1, **each}] for each in (both, both, {}, hot, hot)]


def test_only_rows_that_wait_for_answers_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_run", fail_for_odd_rows)

    async def use() -> list[Any]:
        worker = Worker(tmp_path)
        await worker._load()
        asked = [asyncio.create_task(worker.ask([{}] * count)) for count in [2000] * 5 + [192]]
        await asyncio.sleep(0)
        assert worker.waiting == 4 * 2000 + 192
        asked[0].cancel()  # its client has left
        async with working(worker):
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert (worker.waiting, len(await worker.ask([{}] * 2000))) == (0, 2000)
        return found

    left, *found, full, last = asyncio.run(use())
    assert [len(each) for each in (*found, last)] == [2000, 2000, 2000, 192]
    assert isinstance(left, asyncio.CancelledError)
    assert isinstance(full, FullError)


def test_a_process_that_ends_within_an_answer_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_run", end_within_an_answer)

    async def wait_for_start(worker: Worker, least: int) -> None:
        while worker.restarts < least or not worker.model:
            await asyncio.sleep(0.1)

    async def use() -> None:
        worker = Worker(tmp_path)
        with pytest.raises(LostError):  # it is still loading
            await worker.ask([{}])
        await worker._load()
        assert worker.model == Model("embed", ("text",))
        async with working(worker):
            lost = [worker.ask([{}]), worker.ask([{}, {}])]
            found = await asyncio.gather(*lost, return_exceptions=True)
            assert [type(each) for each in found] == [LostError, LostError]
            with pytest.raises(LostError):
                await worker.ask([{}])
            await wait_for_start(worker, 1)
            assert worker.restarts == 1
            assert await worker.ask([{}, {}]) == [{"row": 1}, {"row": 2}]
            with monkeypatch.context() as full:
                start = Mock(side_effect=OSError(errno.ENOMEM, "no memory"))
                full.setattr("multiprocessing.context.SpawnProcess.start", start)
                worker._process.kill()  # between requests
                while start.call_count < 2:
                    await asyncio.sleep(0.1)
            await wait_for_start(worker, 3)
            assert await worker.ask([{}]) == [{"row": 1}]
        assert not worker._process.is_alive()

    asyncio.run(asyncio.wait_for(use(), 120))


def test_predictions_are_columns() -> None:
    from jobs.serve.rows import to_answer

    loaded = Loaded(SimpleNamespace(config=None))
    asked = {"question": "q", "context": "c", "score": 1}
    for task, row, found, answer in (
        ("classify", {"label": "b"}, {"labels": {"a": 0.5}}, {"label": "a", "probability": 0.5}),
        ("squad", asked, {"text": "c", "score": 1}, {"answer": "c", "score": 1}),
    ):
        kind: Any = TASKS[task]
        assert to_answer(kind, loaded, found, Row("row 1", row)) == answer


def test_the_tokens_of_a_long_text_are_counted_in_its_beginning() -> None:
    from jobs.serve.rows import to_answer

    tokenizer: Any = Mock(model_max_length=8, return_value={"input_ids": range(512)})
    model: Any = SimpleNamespace(config=None, named_modules=tuple)
    loaded, kind = Loaded(model, tokenizer), cast("Any", TASKS["embed"])
    found: Any = to_answer(kind, loaded, {"embedding": [1.0]}, Row("row 1", {"text": "a" * 9999}))
    assert found[TOKENS] == 8
    tokenizer.assert_called_once_with("a" * 512)


def test_the_column_of_training_is_a_name_for_a_text() -> None:
    from jobs.serve.rows import read_row

    kind: Any = TASKS["embed"]
    for row in ({"question": "a"}, {"text": "a", "question": "b"}):
        assert read_row(kind, {"text": "question"}, 1, row).text("text") == "a"
    assert "text" not in read_row(kind, {"text": "question"}, 1, {"question": 5}).values


def load_nothing(pipe: Connection, folder: str, _: int | None) -> None:
    pipe.recv()
    pipe.send(UnloadableError("no weights"))


def test_a_model_that_can_not_be_loaded_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jobs.cli.results.serve import serve

    monkeypatch.setattr(module, "_run", load_nothing)
    why = f"model {tmp_path} can't be loaded: no weights"
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, pytest.raises(JobError, match=why):
        serve(tmp_path, listener, None, None)

    start = Mock(side_effect=OSError(errno.ENOMEM, "no memory"))
    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", start)
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, pytest.raises(JobError, match=r"can't be loaded: .*no memory"):
        serve(tmp_path, listener, None, None)
