"""Find the best answer to each question, and score all of them by SQuAD v1.1's own measures.

The measures are defined by the evaluation script at https://rajpurkar.github.io/SQuAD-explorer/.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .batches import collate
from .dataset import Question
from .features import Feature, build_features, lengths
from .model import Loaded
from .session import Session

MAX_ANSWER_TOKENS = 30
"""Longer answers are not considered, as in BERT's own recipe for SQuAD."""

Floats = NDArray[np.float32]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


class Span(NamedTuple):
    """A candidate answer: characters ``begin`` to ``end`` of the passage."""

    score: float
    begin: int
    end: int


class Scores(NamedTuple):
    """Percentages: answers that match exactly, and the mean overlap of words."""

    em: float
    f1: float


def normalize(text: str) -> str:
    """Lower case, without punctuation, articles and superfluous blanks."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, truth: str) -> float:
    """1.0 where both say the same after normalization, else 0.0."""
    return float(normalize(prediction) == normalize(truth))


def f1(prediction: str, truth: str) -> float:
    """The harmonic mean of precision and recall over words, 0.0 to 1.0."""
    said, true = normalize(prediction).split(), normalize(truth).split()
    common = (Counter(said) & Counter(true)).total()
    # Precision c/|said| and recall c/|true| have the harmonic mean 2c/(|said|+|true|).
    return 2 * common / (len(said) + len(true)) if common else 0.0


def score(questions: Sequence[Question], predictions: Mapping[str, str]) -> Scores:
    """The best match with any accepted answer, averaged over the questions; none is skipped."""

    def mean(measure: Callable[[str, str], float]) -> float:
        best = [
            max(measure(predictions[question.id], answer.text) for answer in question.answers)
            for question in questions
        ]
        return 100 * sum(best) / len(best)

    return Scores(mean(exact_match), mean(f1))


def best_span(start: Floats, end: Floats, feature: Feature) -> Span | None:
    """The best-scored answer inside one window, from its logits; None if it holds no passage."""
    inside = feature.offsets[:, 0] >= 0
    if not inside.any():
        return None
    start = np.where(inside, start, -np.inf)
    end = np.where(inside, end, -np.inf)
    best = Span(-np.inf, 0, 0)
    # Every span of up to MAX_ANSWER_TOKENS, one width at a time: exact, and as quick as
    # combining the n best starts and ends.
    for width in range(min(MAX_ANSWER_TOKENS, len(feature))):
        sums = start[: len(start) - width] + end[width:]
        first = int(sums.argmax())
        if sums[first] > best.score:
            begin, stop = feature.offsets[first, 0], feature.offsets[first + width, 1]
            best = Span(float(sums[first]), int(begin), int(stop))
    return best


def predict(session: Session, loaded: Loaded, questions: Sequence[Question]) -> dict[str, str]:
    """An answer for every question, by its id; the ranks share the work, and all get the result."""
    ranks, options = session.ranks, session.options
    share = questions[ranks.rank :: ranks.size]
    features = build_features(share, loaded.tokenizer, options.max_length, options.stride)
    best: dict[int, Span] = {}
    for feature, start, end in _logits(session, loaded, features):
        span = best_span(start, end, feature)
        known = best.get(feature.question)
        if span is not None and (known is None or span.score > known.score):
            best[feature.question] = span
    mine = {question.id: "" for question in share}
    for index, span in best.items():
        mine[share[index].id] = share[index].context[span.begin : span.end]
    return {id_: text for part in ranks.gather(mine) for id_, text in part.items()}


def _logits(
    session: Session, loaded: Loaded, features: Sequence[Feature]
) -> Iterator[tuple[Feature, Floats, Floats]]:
    """Each feature with its start and end logits, shape (tokens,); alike lengths together."""
    import torch

    loaded.model.eval()
    order = np.argsort(-lengths(features), kind="stable")
    size = 2 * session.options.batch_size
    for first in range(0, len(order), size):
        batch = [features[index] for index in order[first : first + size]]
        with torch.inference_mode(), session.autocast():
            output = loaded.model(**collate(batch, loaded.pad_token))
        starts = output.start_logits.float().numpy()
        ends = output.end_logits.float().numpy()
        for feature, start, end in zip(batch, starts, ends, strict=True):
            yield feature, start[: len(feature)], end[: len(feature)]
