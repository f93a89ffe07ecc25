"""SQuAD v1.1's metrics: exact match, and the overlap of words (F1).

The evaluation script defines them: https://rajpurkar.github.io/SQuAD-explorer/.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .dataset import Question

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


class Scores(NamedTuple):
    """Percentages: answers that match exactly, and the mean overlap of words."""

    em: float
    f1: float


def normalize(text: str) -> str:
    """Return a text in lower case, without punctuation, articles, and extra blanks."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, truth: str) -> float:
    """Return 1.0 if both are equal after normalization, else 0.0."""
    return float(normalize(prediction) == normalize(truth))


def f1(prediction: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall over words, 0.0 to 1.0."""
    said, true = normalize(prediction).split(), normalize(truth).split()
    common = (Counter(said) & Counter(true)).total()
    if not common:
        return 0.0
    # In the official script's order of operations, for bitwise equal results.
    precision, recall = common / len(said), common / len(true)
    return (2 * precision * recall) / (precision + recall)


def score(questions: Sequence[Question], predictions: Mapping[str, str]) -> Scores:
    """Return the best match with any accepted answer, averaged over the questions.

    A question without a prediction counts as wrong, as in the official script.
    """

    def mean(measure: Callable[[str, str], float]) -> float:
        best = [
            max(measure(predictions[question.id], answer.text) for answer in question.answers)
            for question in questions
            if question.id in predictions
        ]
        return 100 * sum(best) / len(questions)

    return Scores(mean(exact_match), mean(f1))
