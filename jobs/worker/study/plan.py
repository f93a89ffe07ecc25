"""What a study varies, as one value for the laptop and the ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STUDY = "study"
"""In the state folder of a job: the study's journal, and the output of its best trial."""
OWN_METRICS = ".metrics"
"""In that output: the trial's metrics."""


@dataclass(frozen=True)
class Domain:
    """The values of an option: ``choices``, or without them the numbers from ``low`` to ``high``.

    Whole numbers at both ends mean whole numbers between them. ``log`` draws their logarithm evenly.
    """

    choices: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False


@dataclass(frozen=True)
class StudyPlan:
    """The options to vary, by name, and how many trials to run at most."""

    tune: Mapping[str, Domain]
    trials: int

    @property
    def size(self) -> int:
        """The number of all combinations; 0 if an option has a range."""
        return math.prod(len(each.choices) for each in self.tune.values())

    def combinations(self) -> list[dict[str, Any]]:
        """Return all combinations of the choices; none if an option has a range."""
        values = itertools.product(*(each.choices for each in self.tune.values()))
        return [dict(zip(self.tune, each, strict=True)) for each in values]

    @classmethod
    def from_fields(cls, content: Mapping[str, Any]) -> StudyPlan:
        """Return the value of which ``dataclasses.asdict`` made the content, also by way of JSON."""
        tune = {
            name: Domain(**{**each, "choices": tuple(each["choices"])})
            for name, each in content["tune"].items()
        }
        return cls(tune, content["trials"])
