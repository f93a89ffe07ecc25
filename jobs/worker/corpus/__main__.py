"""``python -m worker.corpus OPTIONS [--resume]``: one rank of `spr-cluster predict --nodes`.

OPTIONS is :class:`.options.PredictOptions` as JSON. Every rank predicts one shard after another, in its own
process on the rank's cores, which is replaced if it is killed. Rank 0 serves the
:class:`.coordinator.Coordinator` to all of them. A rank or node that is lost ends the job; its next attempt,
on the nodes that are left, predicts what the output lacks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..pool.rank import PoolRank
from ..pool.stop import Stop
from ..program.environment import requested_threads
from ..runtime.output import RESULTS, save_json
from ..runtime.pinning import take_place
from ..runtime.process import STOPPED, VARIABLES, hide_progress_bars, leave, read_words
from .coordinator import KEPT, Coordinator
from .options import PredictOptions
from .runner import ShardRunner


def lead(rank: PoolRank, options: PredictOptions) -> int:
    """Run rank 0: the coordinator beside its own shards, and the results."""
    report = partial(rank.events.emit, "phase")
    report(name="predict")
    note, size = rank.events.note, rank.identity.size
    coordinator = Coordinator(options, note, lambda text: report(name=text), size, KEPT)
    if not rank.lead(coordinator, ShardRunner(rank, options).run_all):
        return STOPPED
    found = coordinator.finish()
    Path("output").mkdir(exist_ok=True)
    save_json(Path("output", RESULTS), found)
    rank.events.emit("result", **found)
    return 0


def main(argv: Sequence[str]) -> int:
    """Predict as this rank. Returns its exit code."""
    hide_progress_bars()
    options = PredictOptions(**json.loads(argv[0]))
    rank = PoolRank("predictions", Stop())

    def work() -> int:
        if Path(VARIABLES).exists():
            os.environ.update(dict(word.split("=", 1) for word in read_words(Path(VARIABLES))))
        take_place(os.environ, requested_threads)
        if rank.identity.rank:
            return rank.follow(ShardRunner(rank, options).run_all)
        return lead(rank, options)

    return rank.run(work)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
