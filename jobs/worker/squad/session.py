"""What every phase of one run needs, as one value."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..runtime.events import Events
from ..runtime.precision import Precision
from ..runtime.ranks import Ranks
from .options import TrainOptions


@dataclass(frozen=True)
class Session:
    """One run, seen from one rank."""

    options: TrainOptions
    ranks: Ranks
    events: Events
    precision: Precision
    hosts: Sequence[str] = ("",)
    """The ranks' host names, in rank order."""

    def autocast(self) -> AbstractContextManager[Any]:
        """bf16 arithmetic for what runs inside, where this run uses it."""
        import torch

        enabled = self.precision.dtype == "bf16"
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)
