"""SIGTERM as a wish that is granted after the step: the ranks agree on the step by :mod:`.pace`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

EXIT_CODE = 128 + signal.SIGTERM
"""143, of a run that was told to end, and did so in good order."""


@dataclass
class Wish:
    """Whether this process was asked to end."""

    stop: bool = False


@contextmanager
def listen() -> Iterator[Wish]:
    """Note a SIGTERM instead of ending by it, for the duration of a ``with`` block.

    One that nobody has looked at by the end of the block ends the process then. mpirun (Hydra) hands
    the SIGTERM that it gets itself on to every rank of every node, and waits for them [tried: 2021.18].
    """
    wish = Wish()

    def note(_number: int, _frame: object) -> None:
        wish.stop = True

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield wish
    finally:
        signal.signal(signal.SIGTERM, before)
    if wish.stop:
        signal.raise_signal(signal.SIGTERM)
