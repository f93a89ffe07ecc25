"""How far a run has come: all that goes on from one step to the next beside the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .divergence import DivergenceDetector


@dataclass
class Progress:
    """``samples`` (features, repeated ones included) and ``tokens`` (without padding) are those of
    all ranks, ``seconds`` those of training, interruptions left out.

    ``curve`` holds (step, mean loss of all ranks), ``resumed`` the steps after which an interrupted run
    went on, with the ``seconds`` until there.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    resumed: list[tuple[int, float]] = field(default_factory=list)
    watch: DivergenceDetector = field(default_factory=DivergenceDetector)

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Progress:
        """What ``asdict`` made, also after a way through JSON. Raises ``TypeError``."""
        pairs = {name: [(a, b) for a, b in content[name]] for name in ("curve", "resumed")}
        return Progress(**{**content, **pairs, "watch": DivergenceDetector(**content["watch"])})
