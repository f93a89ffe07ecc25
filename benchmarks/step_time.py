"""The model of step time compared with the published 26 minutes -> 7 minutes 30.

python -m benchmarks.step_time
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from benchmarks.common import finish
from jobs.experiments.step_model import EPOCH_S, SQUAD_FEATURES, StepModel

BATCH, RANKS = 32, 2
PARAMETERS = 66_364_418
"""DistilBERT with its question-answering head."""
# Word and position embeddings of width 768: their gradient is ready only when the backward pass ends.
_EMBEDDINGS = (30_522 + 512) * 768
FLOWS_GBIT_S = (5, 10, 25)
"""One TCP flow on EC2: anywhere, in a cluster placement group, and at most with ENA Express.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-network-bandwidth.html"""
_NOT_EXPLAINED = (
    "which flow it was: the article does not say whether the nodes shared a placement group",
    "what of the times is not training: loading, evaluation; they are rounded to half minutes",
    "that IPEX is left out on four nodes, and that two processes of 26 busy threads each share 32 cores",
)


@dataclass(frozen=True)
class PublishedComparison:
    """The modeled epoch of four nodes at some flow speed, from the published time of one node.

    Seconds without any overlap of the exchange, and with overlap of all but the embeddings' gradient.
    ``overlap`` is what would explain the published time, ``None`` if nothing does; ``unexplained_s`` is
    then the difference: above zero the model is too slow, below zero too fast.
    """

    gbit_s: float
    without_overlap_s: float
    with_overlap_s: float
    overlap: float | None
    unexplained_s: float


def compare_with_published(gbit_s: float) -> PublishedComparison:
    """Model the epoch of four nodes, each as fast per sample as the published single node."""
    most = 1 - _EMBEDDINGS / PARAMETERS

    def epoch(overlap: float) -> float:
        model = StepModel(
            sample_s=EPOCH_S[1] / SQUAD_FEATURES,
            gradient_bytes=4.0 * PARAMETERS,
            bytes_per_second=gbit_s * 1e9 / 8,
            overlap=overlap,
            ranks_per_node=RANKS,
        )
        return model.epoch_s(SQUAD_FEATURES, 4, BATCH * RANKS)

    slow, quick, seen = epoch(0.0), epoch(most), EPOCH_S[4]
    # Linear in the overlap while the backward pass is longer than what it hides.
    overlap = most * (slow - seen) / (slow - quick)
    inside = 0 <= overlap <= most
    rest = 0.0 if inside else (quick if seen < quick else slow) - seen
    return PublishedComparison(gbit_s, slow, quick, overlap if inside else None, rest)


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
