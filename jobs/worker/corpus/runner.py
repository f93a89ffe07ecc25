"""The shards of one rank, in a process beside it that has the model, and is replaced if it is killed."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from ..pool.rank import PoolRank, die_with_parent, send_below
from ..runtime.errors import DatasetError, TrainingError, WorkerError
from ..training.options import is_url
from .coordinator import INPUTS, parse_shard
from .files import Output
from .options import PredictOptions, Shard
from .shards import Predictor

_TRIES, _SPAWN = 5, multiprocessing.get_context("spawn")
_predictor: Predictor | None = None


def _load(options: PredictOptions) -> None:
    global _predictor
    die_with_parent()
    _predictor = Predictor(options, INPUTS)


def _predict(shard: Shard, output: Output) -> dict[str, Any]:
    assert _predictor
    try:
        return _predictor.predict(shard, output)
    except WorkerError as error:
        return {"message": error.message, "hint": error.hint}


def kill(process: Any) -> None:
    """End the process that predicts."""
    process.kill()


class ShardRunner:
    """Predicts shards until none is left."""

    def __init__(self, rank: PoolRank, options: PredictOptions) -> None:
        self._rank, self._options = rank, options
        self._pool: ProcessPoolExecutor | None = None

    def run_all(self) -> None:
        """Predict until nothing is left, or this process is to stop. Raises :class:`WorkerError`."""
        rank = self._rank
        to, place = rank.remote.call("join", rank.identity.rank, socket.gethostname())
        output = Output(place)
        while not rank.stop.requested:
            asked = rank.remote.call("ask", rank.identity.rank)
            found = self._run(parse_shard(asked), output) if asked else None
            if not asked or not found:
                break
            if to and found["name"] and not is_url(place):
                self._send(output, found["name"], to)
            rank.remote.call("tell", asked["number"], asked["first"], found)
        if self._pool:
            self._pool.shutdown()

    def _run(self, shard: Shard, output: Output) -> Mapping[str, Any] | None:
        """Return what was done of a shard; ``None`` if this process is to stop."""
        for _ in range(_TRIES):
            try:
                self._pool = self._pool or ProcessPoolExecutor(1, _SPAWN, _load, (self._options,))
                future = self._pool.submit(_predict, shard, output)
                (process,) = self._pool._processes.values()
                self._rank.stop.watch(process)  # type: ignore[arg-type]
                found: dict[str, Any] = future.result()
            except BrokenProcessPool:
                self._pool = None
                process.join()
                if self._rank.stop.has_ended(process.exitcode or 0):
                    return None
                place = f"{shard.source.name}: rows from {shard.first + 1:,} on"
                self._rank.events.warn(f"{place}: the process that predicts them was killed")
                continue
            if "message" in found:
                raise DatasetError(found["message"], hint=found["hint"])
            return found
        raise TrainingError(
            f"{place}: the process that predicts them was killed {_TRIES} times",
            hint="does the node have enough memory? --ppn 1 needs less",
        )

    def _send(self, output: Output, name: str, to: str) -> None:
        """Send a part to the node of rank 0, which must have it."""
        place = Path(output.place).absolute()
        new = f".from-{self._rank.identity.rank}"
        take = f"mkdir -p {place}/{new} && cd {place} && tar -C {new} -xf - && mv {new}/{name} ."
        if send_below(place, [name], to, take):
            raise OSError(f"{name} can't be copied to {to}")
        (place / name).unlink()
