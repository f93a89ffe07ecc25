"""The published figures, and what the model of step time makes of them. Pure.

https://huggingface.co/blog/intel-sapphire-rapids (December 2022): an epoch of SQuAD v1.1 with DistilBERT
in 26 minutes on one r7iz.metal-16xl, by one process with batch 32, and in 7 minutes 30 on four of them, by
two processes each with batch 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jobs.experiments.step_model import StepModel

SQUAD_FEATURES = 88_500
"""Features of SQuAD v1.1's training set at 384 tokens and stride 128, about."""
EPOCH_S: Mapping[int, float] = {1: 26 * 60.0, 4: 7 * 60.0 + 30}
"""Seconds by nodes."""
MACHINE = "r7iz.metal-16xl"
BATCH, RANKS = 32, 2
PARAMETERS = 66_364_418
"""DistilBERT's, with the head for question answering."""
# Word and position embeddings of 768 numbers: their gradient is ready when the backward pass is over.
_EMBEDDINGS = (30_522 + 512) * 768
FLOWS_GBIT_S = (5, 10, 25)
"""One TCP flow on EC2: anywhere, in a cluster placement group, and at most with ENA Express.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-network-bandwidth.html"""


def published_speedups() -> dict[int, float]:
    """By nodes, against one."""
    return {nodes: EPOCH_S[1] / seconds for nodes, seconds in EPOCH_S.items()}


@dataclass(frozen=True)
class PublishedComparison:
    """Four nodes' epoch over a flow of some speed, from the figure for one node alone.

    Seconds if nothing of the exchange overlaps, and if all but the embeddings' gradient does.
    ``overlap`` is what the published time needs, ``None`` where none explains it; ``unexplained_s`` is
    then what remains: above zero the model is too slow, below zero too fast.
    """

    gbit_s: float
    without_overlap_s: float
    with_overlap_s: float
    overlap: float | None
    unexplained_s: float


def compare_with_published(gbit_s: float) -> PublishedComparison:
    """What the model says of four nodes: a node computes a sample as fast as the one alone did."""
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
    # Linear in the overlap, as long as the backward pass is longer than what it hides.
    overlap = most * (slow - seen) / (slow - quick)
    inside = 0 <= overlap <= most
    rest = 0.0 if inside else (quick if seen < quick else slow) - seen
    return PublishedComparison(gbit_s, slow, quick, overlap if inside else None, rest)
