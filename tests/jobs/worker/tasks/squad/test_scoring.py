"""SQuAD's metrics, with values computed by hand or by brute force."""

from __future__ import annotations

import math
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.worker.tasks.squad.dataset import Answer, Question
from jobs.worker.tasks.squad.metrics import (
    Answers,
    exact_match,
    f1,
    fit_threshold,
    judge,
    normalize,
    score,
    score_v2,
)


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("The  Cat's, \n a hat!", "cats hat"),
        # Articles: whole words, whatever their case; what remains of a word is none.
        ("a-team", "ateam"),  # punctuation goes first, so there is no article left
        ("the_end", "theend"),
        ("T.H.E. one", "one"),  # and it may leave an article behind
        # Punctuation: all of ASCII's, joined without a blank; no other.
        (string.punctuation, ""),
        ("São “Paulo”", "são “paulo”"),
        ("the—end", "—end"),  # a dash of Unicode ends a word, so this is an article
        # Blanks: any of Unicode's, one between words, none around.
        ("no\u00a0break\u3000wide\u2003em", "no break wide em"),
        ("  \n", ""),
        # Case: that of Unicode. Nothing is composed, and no number is read.
        ("ÉCOLE STRASSE ΣΊΣΥΦΟΣ", "école strasse σίσυφος"),
        ("İ", "i\u0307"),
    ],
)
def test_normalize(text: str, bare: str) -> None:
    assert normalize(text) == bare


@pytest.mark.parametrize(
    ("prediction", "truth", "em", "overlap"),
    [
        ("Linux kernel", "Linux kernel", 1, 1),
        ("kernel Linux", "Linux kernel", 0, 1),  # the order of words counts in EM only
        ("kernel of Linux", "Linux kernel", 0, 4 / 5),
        ("a b c d", "c d e", 0, 2 * (2 / 3) * (2 / 3) / (4 / 3)),  # the a is no word
        ("cores", "threads", 0, 0),
        ("", "threads", 0, 0),
        # Words count as often as they stand there.
        ("two two three", "two three three", 0, 2 / 3),
        # Nothing is left of either: they match exactly, but have no word in common.
        ("an", "the", 1, 0),
        # Numbers are words.
        ("1,000", "1000", 1, 1),
    ],
)
def test_measures(prediction: str, truth: str, em: float, overlap: float) -> None:
    assert exact_match(prediction, truth) == em
    assert f1(prediction, truth) == pytest.approx(overlap, abs=1e-15)


CONTEXT = "eight tile registers"
WHOLE, PART = Answer(CONTEXT, 0), Answer("eight", 0)


def ask(*answers: Answer, id_: str = "q") -> Question:
    return Question(id_, "?", CONTEXT, answers)


EMPTIED = Answer("the", 0)


@pytest.mark.parametrize(
    ("a", "b", "predictions", "expected"),
    [
        ([WHOLE, PART], [WHOLE], {"a": "Eight", "b": "tile registers"}, (50, (100 + 80) / 2)),
        # EM from neither, F1 from the second: 2 of 2 and 2 of 3 words.
        ([PART, WHOLE], [WHOLE], {"a": "tile registers", "b": CONTEXT}, (50, (80 + 100) / 2)),
        ([EMPTIED], [WHOLE], {"a": "", "b": CONTEXT}, (100, 50)),
    ],
)
def test_the_score_is_the_mean_of_each_measures_best_accepted_answer(
    a: list[Answer], b: list[Answer], predictions: dict[str, str], expected: tuple[float, float]
) -> None:
    assert score([ask(*a, id_="a"), ask(*b, id_="b")], predictions) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("truths", "answer", "expected"),
    [
        ((), "", (1, 1)),
        ((), "eight", (0, 0)),
        ((), "The!", (1, 1)),  # nothing is left of it
        (("eight",), "", (0, 0)),
        (("eight tile",), "tile", (0, 2 / 3)),
        (("eight", "tile eight"), "eight tile", (0, 1)),
        # Answers of which nothing is left do not count; if there is no other, "" is right.
        (("the", "eight"), "", (0, 0)),
        (("the",), "", (1, 1)),
    ],
)
def test_answers_to_questions_that_may_have_none(
    truths: tuple[str, ...], answer: str, expected: tuple[float, float]
) -> None:
    question = ask(*(Answer(text, 0) for text in truths))
    assert judge(question, answer) == pytest.approx(expected)


GUESSES = st.sampled_from([CONTEXT, "eight", "tile registers", "eight tile no", "no"])


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.booleans(), GUESSES, st.integers(-99, 99)),
        min_size=1,
        max_size=12,
        unique_by=lambda row: row[2],
    ).filter(lambda rows: not all(answered for answered, *_ in rows))
)
def test_no_threshold_is_better_than_the_best(rows: list[tuple[bool, str, int]]) -> None:
    asked = [ask(*[WHOLE] * answered, id_=str(n)) for n, (answered, *_) in enumerate(rows)]
    odds = {str(n): row[2] + 0.5 for n, row in enumerate(rows)}
    raw = Answers({str(n): row[1] for n, row in enumerate(rows)}, odds)

    def mean(measure: str, threshold: float, kinds: tuple[bool, ...] = (True, False)) -> float:
        """Score the answers with that threshold one by one."""
        kept = {key: text if odds[key] <= threshold else "" for key, text in raw.texts.items()}
        each = [
            getattr(score([question], kept), measure)
            if question.answers
            else 100.0 * (kept[question.id] == "")
            for question in asked
            if bool(question.answers) in kinds
        ]
        return sum(each) / len(each)

    fitted = fit_threshold(asked, raw)
    found = score_v2(asked, raw.with_threshold(fitted), fitted)
    for measure in ("em", "f1"):
        tried = {value: mean(measure, value) for value in (-math.inf, *sorted(odds.values()))}
        assert found[f"best_{measure}"] == pytest.approx(max(tried.values()))
        threshold = found[f"best_{measure}_threshold"]
        if threshold in tried:
            assert tried[threshold] == pytest.approx(max(tried.values()))
        else:
            assert threshold == 0
            assert tried[-math.inf] == pytest.approx(max(tried.values()))
        assert found[measure] == pytest.approx(mean(measure, fitted))
        for kind in {bool(each.answers) for each in asked}:
            name = f"{'has' if kind else 'no'}_answer_{measure}"
            assert found[name] == pytest.approx(mean(measure, fitted, (kind,)))
    # The files hold the answers with the threshold: the script finds the same best scores in them.
    before = score_v2(asked, raw, 0.0)
    best = {key for key in found if "best" in key}
    assert {key: found[key] for key in best} == {key: before[key] for key in best}
