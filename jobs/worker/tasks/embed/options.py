"""The options of `train embed`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...training.options import Range, option
from ...training.teacher import TeacherOptions
from ...training.text_task import RowOptions

FOUND_AT = (1, 10)
"""The results contain recall among this many candidates."""


@dataclass(frozen=True)
class EmbedOptions(TeacherOptions):
    """One training run of an encoder. Raises ``ValueError`` for what does not fit together."""

    task = "embed"
    metrics: ClassVar[Mapping[str, str]] = {
        "mrr": "max",
        **{f"recall_at_{most}": "max" for most in FOUND_AT},
    }
    splits_batches = False
    # Pairs with the same passage have about the same length. In one batch, they would leave few negatives.
    batches_sharing_lengths = 8

    text_column: str | None = option(
        None, "column with the anchors, such as questions", metavar="NAME"
    )
    pair_column: str | None = option(
        None, "column with each anchor's positive, such as the passage to find", metavar="NAME"
    )
    negative_column: str | None = option(
        None,
        "column with a text, or a list of texts, not to be found for the anchor",
        metavar="NAME",
    )
    mine_negatives: int | None = option(
        None,
        "add up to K passages that the model itself finds for each anchor, before training",
        kind=int,
        within=Range(1, 100),
        metavar="K",
    )
    corpus: str | None = option(
        None, "more passages that are candidates in evaluation", metavar="PATH|NAME"
    )
    query_prompt: str | None = option(None, "text before each anchor", metavar="TEXT")
    passage_prompt: str | None = option(None, "text before each other text", metavar="TEXT")
    matryoshka: str | None = option(
        None, "also learn the first N dimensions of the vectors", metavar="N,…"
    )
    temperature: float = option(
        0.05, "divides cosine similarities before the softmax", within=Range(0.001, 10)
    )
    epochs: int = RowOptions.redefine("epochs", 1)
    batch_size: int = RowOptions.redefine("batch_size", 32)
    max_length: int = RowOptions.redefine("max_length", 256)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate > 1:
            raise ValueError(
                "--accumulate: `embed` needs whole batches, in which every text is a negative of the "
                "others; use a smaller --batch-size"
            )
        if self.teacher_file:
            raise ValueError("--teacher: `embed` learns vectors: give a model, not a file")
        if self.matryoshka and not re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", self.matryoshka):
            raise ValueError(
                f"--matryoshka {self.matryoshka!r}: expected numbers such as 256,128,64"
            )

    @property
    def sizes(self) -> list[int]:
        """The vectors' beginnings to learn, by their dimensions."""
        return [int(each) for each in (self.matryoshka or "").split(",") if each]
