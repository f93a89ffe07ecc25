"""SIGTERM as a request to stop after a step, on which all ranks agree (see :mod:`.pace`)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

EXIT_CODE = 128 + signal.SIGTERM
"""143, of a run that stopped in good order after a request."""


@dataclass
class StopRequest:
    """Whether this process was asked to stop."""

    stop: bool = False


@contextmanager
def listen() -> Iterator[StopRequest]:
    """Record a SIGTERM instead of ending by it, for the duration of a ``with`` block.

    If one arrived and the block ends normally, the process ends by it then. mpirun (Hydra) forwards
    the SIGTERM that it gets to every rank of every node, and waits for them [tried: 2021.18].
    """
    request = StopRequest()

    def note(_number: int, _frame: object) -> None:
        request.stop = True

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
    if request.stop:
        signal.raise_signal(signal.SIGTERM)
