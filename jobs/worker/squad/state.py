"""What training changes, as tensors: taken, shared among the ranks, and put back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..runtime.ranks import Ranks
from .divergence import DivergenceDetector


class State(NamedTuple):
    """What training changes: two of torch's objects, which save and load themselves."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer


@dataclass
class TrainingProgress:
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
    def from_dict(content: Mapping[str, Any]) -> TrainingProgress:
        """What ``asdict`` made, also after a way through JSON. Raises ``TypeError``."""
        pairs = {name: [(a, b) for a, b in content[name]] for name in ("curve", "resumed")}
        return TrainingProgress(
            **{**content, **pairs, "watch": DivergenceDetector(**content["watch"])}
        )


class Hole(NamedTuple):
    """The place of a tensor that travels by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def share_tensors(value: Any, ranks: Ranks) -> Any:
    """Rank 0's nested dictionaries and lists of tensors, on every rank; one tensor at a time.

    As one message a large model would need its own size several times more.
    """
    if ranks.size == 1:
        return value
    outline = ranks.share(hollow(value) if ranks.first else None)

    def fill(part: Any, own: Any) -> Any:
        if isinstance(part, Hole):
            tensor = own.contiguous() if ranks.first else torch.empty(part.shape, dtype=part.dtype)
            dist.broadcast(tensor, src=0, group=ranks.control)
            return tensor
        if isinstance(part, dict):
            return {
                key: fill(each, own[key] if ranks.first else None) for key, each in part.items()
            }
        if isinstance(part, list):
            return [fill(each, own[n] if ranks.first else None) for n, each in enumerate(part)]
        return part

    return fill(outline, value)


def hollow(value: Any) -> Any:
    """The same dictionaries and lists with a :class:`Hole` for each tensor."""
    if isinstance(value, torch.Tensor):
        return Hole(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: hollow(each) for key, each in value.items()}
    return [hollow(each) for each in value] if isinstance(value, list) else value


def random_state() -> dict[str, Any]:
    """Where this process's random numbers are: torch's (dropout), and those that a model may use."""
    name, keys, *rest = np.random.get_state(legacy=True)
    numbers = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "numpy": [name, numbers, *rest],
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Have all random numbers go on from there."""
    name, numbers, *rest = state["numpy"]
    np.random.set_state((name, numbers.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
