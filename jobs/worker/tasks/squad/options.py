"""Options of question answering."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...training.options import SMALL, Range, TextOptions, option

SAMPLE = Path(__file__).with_name("sample.json")
"""The demo's data: about a hundred questions on this project's subject, in SQuAD's layout."""


@dataclass(frozen=True)
class SquadOptions(TextOptions):
    """One training run. A sample is one feature, see :mod:`.features`."""

    task = "squad"

    data: str | None = option(
        None, "training data, a SQuAD v1.1 JSON file (default: --dataset's)", metavar="PATH"
    )
    dataset: str = option("squad", "dataset on the hub, if there is no --data", metavar="NAME")
    stride: int = option(128, "tokens shared by two features of a passage", within=Range(0, 4096))

    def __post_init__(self) -> None:
        super().__post_init__()
        if 2 * self.stride > self.max_length:
            raise ValueError(
                f"--stride {self.stride} is out of range: at most half of --max-length "
                f"({self.max_length}), or features would hardly advance"
            )
        if self.data is not None and self.dataset != "squad":
            raise ValueError("--data and --dataset can't be used together")


DEMO = SquadOptions(data=str(SAMPLE), **SMALL)
