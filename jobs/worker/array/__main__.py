"""``python -m worker.array --folder F --output output [options]``: one rank of an array.

``data/array.json`` has the :class:`.plan.ArrayPlan`. Every rank runs one element after another, each in its
own process on the rank's cores. Rank 0 serves the :class:`.coordinator.ArrayCoordinator` to all of them. A
failed element does not end the others, but the array then fails. Runs on Python 3.8.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..pool.rank import PoolRank
from ..pool.stop import Stop
from ..program.environment import make_parser, requested_threads, start_output
from ..runtime.output import RESULTS
from ..runtime.pinning import take_place
from ..runtime.process import STOPPED, leave, read_words
from .coordinator import ArrayCoordinator, gather, other_nodes
from .elements import ElementRunner, end_group
from .plan import ARRAY, parse_array


def main() -> int:
    """Run this rank's part of the array; returns its exit code."""
    parser = make_parser("array")
    parser.add_argument("--resume", action="store_true", help="continue after the loss of a node")
    args = parser.parse_args()
    rank = PoolRank("array", Stop(end_group))

    def work() -> int:
        take_place(os.environ, requested_threads)
        plan = parse_array(Path(ARRAY).read_text(encoding="utf-8"))
        own = read_words(Path(args.environment)) if args.environment else []
        start_output(Path(args.output), Path(args.folder))
        runner = ElementRunner(rank, plan, args, own)
        if rank.identity.rank:
            return rank.follow(runner.run_all)
        return lead(runner, resume=args.resume)

    return rank.run(work)


def lead(runner: ElementRunner, *, resume: bool) -> int:
    """Run rank 0: the coordinator beside its own elements, and the array's results."""
    rank, here, folder = runner.rank, os.environ.get("SLURMD_NODENAME", ""), Path.cwd()
    rank.events.emit("running", node=here, folder=str(folder))
    nodes = other_nodes(folder, here)
    if resume:
        gather(folder, nodes)
    (folder / runner.args.output / RESULTS).unlink(missing_ok=True)
    second = nodes[0] if nodes else ""
    coordinator = ArrayCoordinator(runner.plan, folder, rank.events, rank.identity.size, second)
    if count := len(coordinator.ended):
        rank.events.note(f"{count} of {len(runner.plan.elements)} elements have ended before")
    is_done = rank.lead(coordinator, runner.run_all)
    coordinator.save()
    if not is_done:
        return STOPPED
    message, hint = coordinator.find_failure()
    if message:
        rank.events.error(message, hint, rank=None)  # not this rank's failure
    return 1 if message else 0


if __name__ == "__main__":
    leave(main())
