"""SQuAD's metrics: exact match and overlap of words (F1), of v1.1 and, with unanswerable questions, of v2.0.

All values equal those of the official evaluation scripts: https://rajpurkar.github.io/SQuAD-explorer/.
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
THRESHOLD = "no_answer_threshold"
"""A model configuration's threshold of null odds; a model without it answers every question."""

LONGEST_ANSWER = "max_answer_length"
"""A model configuration's maximum number of tokens in an answer."""

WINDOW = "answer_window"
"""A model configuration's tokens of a window, and of the overlap."""


class Scores(NamedTuple):
    """Percentages: answers that match exactly, and the mean overlap of words."""

    em: float
    f1: float


def normalize(text: str) -> str:
    """Return a text in lower case, without punctuation, articles, and extra spaces."""
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
    """Return the best match with any accepted answer, averaged over the questions."""

    def mean(measure: Callable[[str, str], float]) -> float:
        best = (max(measure(predictions[q.id], each.text) for each in q.answers) for q in questions)
        return 100 * sum(best) / len(questions)

    return Scores(mean(exact_match), mean(f1))


class Answers(NamedTuple):
    """Every question's answer, and its ``null_odds``: the score of no answer minus that of the answer.

    An answer counts as "" if its null odds are above a threshold. Both are by the questions' IDs.
    """

    texts: Mapping[str, str]
    null_odds: Mapping[str, float]

    def with_threshold(self, threshold: float) -> Answers:
        """Return the answers with "" for those whose null odds are above the threshold."""
        odds = self.null_odds
        texts = {key: "" if odds[key] > threshold else text for key, text in self.texts.items()}
        return Answers(texts, odds)


def judge(question: Question, answer: str) -> Scores:
    """Return v2.0's best match with any accepted answer, 0.0 to 1.0; without one, "" is right."""
    truths = [each.text for each in question.answers if normalize(each.text)]
    em = max(exact_match(answer, truth) for truth in truths or [""])
    return Scores(em, max((f1(answer, truth) for truth in truths), default=em))


def fit_threshold(questions: Sequence[Question], answers: Answers) -> float:
    """Return the threshold of the best F1; 0.0 if every question has an answer, which would fit any."""
    if all(each.answers for each in questions):
        return 0.0
    scores = [judge(each, answers.texts[each.id]).f1 for each in questions]
    return find_best(questions, answers, scores)[1]


def find_best(
    questions: Sequence[Question], answers: Answers, scores: Sequence[float]
) -> tuple[float, float]:
    """Return the best mean of one kind of score, in percent, and the first threshold that reaches it.

    As in the official script, equal null odds count one by one, and the threshold is 0.0 if no other is
    better than no answers at all.
    """
    right = best = float(sum(not each.answers for each in questions))
    threshold = 0.0
    pairs = zip(questions, scores, strict=True)
    for question, score in sorted(pairs, key=lambda pair: answers.null_odds[pair[0].id]):
        if question.answers:
            right += score
        elif answers.texts[question.id]:
            right -= 1
        if right > best:
            best, threshold = right, answers.null_odds[question.id]
    return 100 * best / len(questions), threshold


def score_v2(questions: Sequence[Question], answers: Answers, threshold: float) -> dict[str, float]:
    """Return v2.0's scores in percent, the numbers of questions of both kinds, and the best thresholds.

    The official script calls ``em`` ``exact``, ``has_answer_`` ``HasAns_``, and ``no_answer_`` ``NoAns_``.
    """
    raw = [judge(each, answers.texts[each.id]) for each in questions]
    final = [
        Scores(*2 * [float(not each.answers)]) if answers.null_odds[each.id] > threshold else scores
        for each, scores in zip(questions, raw, strict=True)
    ]
    found = _means("", final)
    for name, wanted in ("has_answer_", True), ("no_answer_", False):
        pairs = zip(questions, final, strict=True)
        chosen = [scores for each, scores in pairs if bool(each.answers) == wanted]
        if chosen:
            found |= _means(name, chosen) | {f"{name}total": len(chosen)}
    for name, column in zip(Scores._fields, zip(*raw, strict=True), strict=True):
        found[f"best_{name}"], found[f"best_{name}_threshold"] = find_best(
            questions, answers, column
        )
    return found


def _means(name: str, scores: Sequence[Scores]) -> dict[str, float]:
    em, overlap = (100 * sum(column) / len(scores) for column in zip(*scores, strict=True))
    return {f"{name}em": em, f"{name}f1": overlap}
