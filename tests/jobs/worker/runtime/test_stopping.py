from __future__ import annotations

import os
import signal
from contextlib import suppress

from jobs.worker.runtime.errors import StoppedError
from jobs.worker.runtime.process import listen


def test_an_unhandled_sigterm_is_not_lost() -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with listen() as request:
            os.kill(os.getpid(), signal.SIGTERM)
            assert request.stop
            assert got == []
        assert got == [signal.SIGTERM]
        with suppress(StoppedError), listen():
            os.kill(os.getpid(), signal.SIGTERM)
            raise StoppedError
        assert got == [signal.SIGTERM], "this one was handled"
    finally:
        signal.signal(signal.SIGTERM, before)
