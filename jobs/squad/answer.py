"""Answers to questions of one's own, by a trained model: ``python -m squad.answer MODEL``.

Standard input has a JSON object a line, ``{"question", "context"}``; standard output has one for each,
``{"text", "score", "start"}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .batches import collate
from .dataset import Answer as Truth
from .dataset import Question
from .errors import ModelError, SquadError
from .evaluation import Span, best_span
from .features import build_features

MAX_LENGTH, STRIDE, BATCH = 384, 128, 16


class Answer(NamedTuple):
    """``text`` begins at character ``start`` of its context; a higher ``score`` is a surer one."""

    text: str
    score: float
    start: int


def answer(model: str | Path, asked: Sequence[tuple[str, str]]) -> list[Answer]:
    """The best answer to each (question, context); raises :class:`.errors.SquadError`."""
    import torch

    from .model import _pretrained

    if not Path(model, "config.json").is_file():
        raise ModelError(f"model {model}: no config.json in it, so it is not a model's folder")
    loaded = _pretrained(str(model))
    limit = getattr(loaded.model.config, "max_position_embeddings", MAX_LENGTH)
    length = min(MAX_LENGTH, limit)
    questions = [
        Question(str(index), text, context, (Truth("", 0),))
        for index, (text, context) in enumerate(asked)
    ]
    features = build_features(questions, loaded.tokenizer, length, min(STRIDE, length // 2))
    best: dict[int, Span] = {}
    loaded.model.eval()
    for first in range(0, len(features), BATCH):
        batch = features[first : first + BATCH]
        with torch.inference_mode():
            output = loaded.model(**collate(batch, loaded.pad_token))
        for row, feature in enumerate(batch):
            starts, ends = output.start_logits[row].numpy(), output.end_logits[row].numpy()
            span = best_span(starts[: len(feature)], ends[: len(feature)], feature)
            known = best.get(feature.question)
            if span is not None and (known is None or span.score > known.score):
                best[feature.question] = span
    return [_as_answer(best.get(index), context) for index, (_, context) in enumerate(asked)]


def _as_answer(span: Span | None, context: str) -> Answer:
    if span is None:
        return Answer("", 0.0, 0)
    return Answer(context[span.begin : span.end], round(span.score, 4), span.begin)


def main(argv: Sequence[str]) -> int:
    """Answer what standard input asks; 1 with a line on standard error where that can't be."""
    try:
        rows = [json.loads(line) for line in sys.stdin if line.strip()]
        found = answer(argv[0], [(row["question"], row["context"]) for row in rows])
    except SquadError as error:
        print(f"squad.answer: error: {error.message}", file=sys.stderr)
        return 1
    for each in found:
        print(json.dumps(each._asdict()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
