"""Clocks for tests of long waits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from tests.infra.local.fakes import FakeTime


class HastyTime(FakeTime):
    """Passes ``pace`` times as fast, so that a wait of 90 minutes asks a few times, not hundreds."""

    pace = 1.0

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds * self.pace)


class AtOnce(Executor):
    """Copies disks in the call that asks for it: a copy in a thread would race with pretended time."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **more))
        except Exception as error:
            future.set_exception(error)
        return future
