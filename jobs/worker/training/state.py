"""The state of a training run: its progress, signs of divergence, and tensors shared among the ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from ..runtime.context import RankContext
from ..runtime.ranks import Ranks
from .options import TrainOptions

TrainContext = RankContext[TrainOptions]
SMOOTHING, RECENT = 0.05, 20
"""A step's weight in the running mean, which thus covers about 20 steps, and the median's number of steps.

A peak among squared errors of prices or counts raises the mean and not the median, and a few low losses of a
diverged run, which may be noisy, don't lower it."""
PATIENCE, SUSPECT = 100, 3
"""Steps with too high a median until the loss counts as diverged, and with too high a loss until it is
suspicious, one after the other. Peaks of a few steps are normal."""
MARGIN = 2.0
"""The loss may be above the best mean by this much, or by the best one itself if that is more.

A random model has a loss of about the logarithm of its number of tokens, 5.9 for 384, and a good model less
than 1.5. They differ by more than this value, two good epochs by much less."""
EARLY, FIRST = 3, 20
"""A run explodes if all of its last losses are far above the highest of the first :data:`EARLY`. The running
mean counts from step :data:`FIRST` on, because it can be low by chance before."""
STUCK_AFTER, STUCK_SHARE = 500, 0.95
"""A loss is stuck if it has not fallen to this share of its beginning after so many steps and a fifth of all
steps: a run with wrong labels costs as much as a good one."""


def _limit(loss: float) -> float:
    """Return the value up to which a loss is normal after this one."""
    return loss + max(MARGIN, loss)


@dataclass
class DivergenceDetector:
    """Watches the loss, which is the same on all ranks: a diverged run would cost as much as a good one."""

    level: float | None = None
    """The loss's running mean."""
    best: float = math.inf
    """The lowest running mean since step :data:`FIRST`."""
    early: float = math.inf
    """The highest of the first :data:`EARLY` losses."""
    high: int = 0
    """The number of consecutive steps at which :attr:`recent` was too high."""
    steps: int = 0
    first: float | None = None
    """The running mean after :data:`FIRST` steps."""
    recent: list[float] = field(default_factory=list)
    """The last losses, :data:`RECENT` at most."""

    def see(self, loss: float) -> None:
        """Add the next step's loss."""
        self.steps += 1
        level = self.level or 0.0
        self.level = level + max(SMOOTHING, 1 / self.steps) * (loss - level)
        self.recent = [*self.recent, loss][-RECENT:]
        if self.steps >= FIRST:
            self.best = min(self.best, self.level)
        if self.steps == FIRST:
            self.first = self.level
        if self.steps == EARLY:
            self.early = max(self.recent)
        lost = min(self.recent) > _limit(self.early) or median(self.recent) > self.limit
        self.high = self.high + 1 if lost else 0

    def is_stuck(self, total: int) -> bool:
        """Return whether a run of ``total`` steps has learned nothing, asked after each step."""
        if self.level is None or self.first is None:
            return False
        return self.steps == max(STUCK_AFTER, total // 5) and self.level > STUCK_SHARE * self.first

    @property
    def limit(self) -> float:
        """The value above which a loss is too high."""
        return _limit(self.best)

    @property
    def suspicious(self) -> bool:
        """The loss is too high now, so that no good checkpoint should be replaced."""
        lowest = min(self.recent[-SUSPECT:], default=0.0)
        return self.high > 0 or lowest > min(self.limit, _limit(self.early))

    @property
    def diverged(self) -> bool:
        """The last losses have been too high for :data:`PATIENCE` steps."""
        return self.high >= PATIENCE


class State(NamedTuple):
    """The state that training changes, as torch objects that can save and load it.

    ``best`` are copies of the weights with the best score so far, by name; only on rank 0.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    best: dict[str, torch.Tensor]


@dataclass
class TrainingProgress:
    """A run's progress. ``samples`` (features) and ``tokens`` (without padding) are sums over all ranks;
    ``seconds`` is training time, without interruptions.

    ``curve`` holds (step, mean loss of all ranks), ``resumed`` the steps after which an interrupted run
    was resumed, with the ``seconds`` until then. ``evaluations`` are scores by name, with their ``step``.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    resumed: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    watch: DivergenceDetector = field(default_factory=DivergenceDetector)
    model_step: int = 0
    """The step that the trained model is from."""

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> TrainingProgress:
        """Restore the result of ``asdict`` from JSON."""
        pairs = {name: [(a, b) for a, b in content[name]] for name in ("curve", "resumed")}
        watch = DivergenceDetector(**content["watch"])
        return TrainingProgress(**{**content, **pairs, "watch": watch})


def share_tensors(value: Any, ranks: Ranks) -> Any:
    """Return rank 0's nested dictionaries and lists of tensors on every rank.

    Each tensor is a message: a single message would need several times the model's memory.
    """
    if ranks.size == 1:
        return value
    own = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    shapes = tree_map_only(torch.Tensor, lambda each: each.to("meta"), value)

    def share(shape: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(shape.shape, dtype=shape.dtype)
        tensor = next(own).contiguous() if ranks.first else empty
        dist.broadcast(tensor, src=0, group=ranks.control)
        return tensor

    return tree_map_only(torch.Tensor, share, ranks.share(shapes if ranks.first else None))


def random_state() -> dict[str, Any]:
    """Return the state of this process's random numbers: torch's (dropout), numpy's, Python's."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numbers = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "numpy": [name, numbers, *rest],
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the state of all random numbers."""
    name, numbers, *rest = state["numpy"]
    np.random.set_state((name, numbers.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
