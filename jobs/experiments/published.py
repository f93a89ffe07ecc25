"""The published epoch times, compared with the step model. Pure.

https://huggingface.co/blog/intel-sapphire-rapids (December 2022): an epoch of SQuAD v1.1 with DistilBERT
in 26 minutes on one r7iz.metal-16xl, by one process with batch 32, and in 7 minutes 30 on four of them, by
two processes each with batch 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jobs.experiments.step_model import StepModel

SQUAD_FEATURES = 88_500
"""Approximate features of SQuAD v1.1's training set at 384 tokens and stride 128."""
EPOCH_S: Mapping[int, float] = {1: 26 * 60.0, 4: 7 * 60.0 + 30}
"""Seconds by number of nodes."""
MACHINE = "r7iz.metal-16xl"
BATCH, RANKS = 32, 2
PARAMETERS = 66_364_418
"""DistilBERT with its question-answering head."""
# Word and position embeddings of width 768: their gradient is ready only when the backward pass ends.
_EMBEDDINGS = (30_522 + 512) * 768
FLOWS_GBIT_S = (5, 10, 25)
"""One TCP flow on EC2: anywhere, in a cluster placement group, and at most with ENA Express.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-network-bandwidth.html"""


def published_speedups() -> dict[int, float]:
    """Return the speedup over one node, by number of nodes."""
    return {nodes: EPOCH_S[1] / seconds for nodes, seconds in EPOCH_S.items()}


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
