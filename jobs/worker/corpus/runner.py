"""The shards of one rank, in a process beside it that has the model, and is replaced if it is killed."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..pool.rank import PoolRank, die_with_parent, render_take, send_below
from ..runtime.errors import DatasetError, TrainingError, WorkerError
from ..training.options import is_url
from .coordinator import INPUTS, KEPT, parse_shard
from .files import Output
from .options import PredictOptions, Shard
from .shards import Predictor

_TRIES, _SPAWN = 5, multiprocessing.get_context("spawn")
_TOGETHER = 500
_predictor: Predictor | None = None


def _predict(options: PredictOptions, shard: Shard, output: Output) -> dict[str, Any]:
    global _predictor
    try:
        _predictor = _predictor or Predictor(options, INPUTS)
        return _predictor.predict(shard, output)
    except WorkerError as error:
        return {"message": error.message, "hint": error.hint}


def keep_parts(place: str) -> list[str]:
    """Return the files that this node has of earlier attempts; in one, it may have been that of rank 0."""
    KEPT.mkdir(exist_ok=True)
    for path in Path(place).glob("[!.]*"):
        with suppress(FileNotFoundError):  # another rank of this node was faster
            path.replace(KEPT / path.name)
    return sorted(path.name for path in KEPT.glob("[!.]*"))


class ShardRunner:
    """Predicts shards until none is left."""

    def __init__(self, rank: PoolRank, options: PredictOptions) -> None:
        self._rank, self._options = rank, options
        self._pool: ProcessPoolExecutor | None = None
        self._process: Any = None

    def run_all(self) -> None:
        """Predict until nothing is left, or this process is to stop. Raises :class:`WorkerError`."""
        rank = self._rank
        to, place = rank.remote.call("join", rank.identity.rank, socket.gethostname())
        is_apart = bool(to) and not is_url(place)
        output = Output(str(KEPT) if is_apart else place)
        if is_apart:
            names = rank.remote.call("offer", rank.identity.rank, keep_parts(place))
            for first in range(0, len(names), _TOGETHER):
                self._send(place, names[first : first + _TOGETHER], to)
        while not rank.stop.requested:
            asked = rank.remote.call("ask", rank.identity.rank)
            found = self._run(parse_shard(asked), output) if asked else None
            if not asked or not found:
                break
            if is_apart and found["name"]:
                self._send(place, [found["name"]], to)
            rank.remote.call("tell", asked["number"], asked["first"], found)
        if self._pool:
            self._pool.shutdown()

    def _run(self, shard: Shard, output: Output) -> Mapping[str, Any] | None:
        """Return what was done of a shard; ``None`` if this process is to stop."""
        place = f"{shard.source.name}: rows from {shard.first + 1:,} on"
        killed = f"{place}: the process that predicts them was killed"
        for _ in range(_TRIES):
            pool = self._pool = self._pool or ProcessPoolExecutor(1, _SPAWN, die_with_parent)
            try:
                future = pool.submit(_predict, self._options, shard, output)
                (self._process,) = pool._processes.values()
                self._rank.stop.watch(self._process)
                found: dict[str, Any] = future.result()
            except BrokenProcessPool:
                self._pool = None
                self._process.join()
                if self._rank.stop.has_ended(self._process.exitcode or 0):
                    return None
                self._rank.events.warn(killed)
                continue
            if "message" in found:
                raise DatasetError(found["message"], hint=found["hint"])
            return found
        raise TrainingError(
            f"{killed} {_TRIES} times",
            hint="does the node have enough memory? --ppn 1 needs less",
        )

    def _send(self, folder: str, names: Sequence[str], to: str) -> None:
        """Send parts to the node of rank 0, which must have them; this node keeps them."""
        take = render_take(Path(folder).absolute(), f"from-{self._rank.identity.rank}")
        send_below(KEPT, names, to, take)
