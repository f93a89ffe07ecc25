"""The model of step time compared with the published 26 minutes -> 7 minutes 30.

python -m benchmarks.step_time
"""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.common import finish
from jobs.experiments.step_model import EPOCH_S, FLOWS_GBIT_S, compare_with_published

_NOT_EXPLAINED = (
    "which flow it was: the article does not say whether the nodes shared a placement group",
    "what of the times is not training: loading, evaluation; they are rounded to half minutes",
    "that IPEX is left out on four nodes, and that two processes of 26 busy threads each share 32 cores",
)


def main() -> None:
    """Predict four nodes' time from one node's and the network; some EC2 bandwidth must match."""
    found = [compare_with_published(gbit) for gbit in FLOWS_GBIT_S]
    for each in found:
        needs = "unexplained" if each.overlap is None else f"overlap {each.overlap:.0%}"
        print(
            f"{each.gbit_s:g} Gbit/s: {each.with_overlap_s:.0f} to {each.without_overlap_s:.0f} s; "
            f"{EPOCH_S[4]:.0f} s: {needs} ({each.unexplained_s:+.0f} s)"
        )
    finish(
        [] if any(each.overlap is not None for each in found) else ["one flow that explains it"],
        benchmark="step_time",
        published_s={str(nodes): seconds for nodes, seconds in EPOCH_S.items()},
        ideal_s=EPOCH_S[1] / 4,
        flows=[asdict(each) for each in found],
        not_explained=_NOT_EXPLAINED,
    )


if __name__ == "__main__":
    main()
