"""EM and F1 compared with another implementation, that of torchmetrics, on real questions.

python -m benchmarks.score_check [--eval dev.json] [--predictions results/JOB/predictions.json] [--rounds 20]

The answers are a job's predictions, if given, and random ones: correct ones in other case, with other
articles and blanks, parts of correct ones, other words of the text, nothing.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.common import finish
from benchmarks.squad_data import DATA
from jobs.worker.tasks.squad.dataset import Question, read_dataset
from jobs.worker.tasks.squad.metrics import score

MOST = 1e-4
"""Percent; torchmetrics sums in fp32."""


def chance_answer(question: Question, chance: random.Random) -> str:
    """Return an answer that is correct, nearly correct, or wrong."""
    right, words = question.answers[0].text, question.context.split()
    place = chance.randrange(len(words))
    return chance.choice(
        [
            right,
            right.upper(),
            f"the {right}.",
            right.replace(" ", "  "),
            right[:-1],
            f"“{right}”",
            " ".join(words[place : place + chance.randrange(1, 9)]),
            "",
        ]
    )


def all_answers(
    questions: Sequence[Question], predictions: Path | None, rounds: int
) -> Iterator[Mapping[str, str]]:
    """Return the answers to score, by question ID."""
    if predictions:
        yield json.loads(predictions.read_text())
    chance = random.Random(2026)
    for _ in range(rounds):
        yield {question.id: chance_answer(question, chance) for question in questions}


def difference(questions: Sequence[Question], answers: Mapping[str, str]) -> float:
    """Return the larger of the differences in EM and F1, in percent."""
    from torchmetrics.functional.text import squad

    said = [{"prediction_text": answers[each.id], "id": each.id} for each in questions]
    true = [
        {
            "answers": {
                "text": [answer.text for answer in each.answers],
                "answer_start": [answer.start for answer in each.answers],
            },
            "id": each.id,
        }
        for each in questions
    ]
    theirs, ours = squad(said, true), score(questions, answers)
    return max(abs(ours.em - float(theirs["exact_match"])), abs(ours.f1 - float(theirs["f1"])))


def main() -> None:
    """Score all answers both ways; print the largest difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eval", type=Path, default=DATA / "dev.json", help="SQuAD v1.1 JSON")
    parser.add_argument("--predictions", type=Path, help="as `train squad` writes them")
    parser.add_argument("--rounds", type=int, default=20, help="of random answers")
    args = parser.parse_args()
    questions = read_dataset(args.eval)
    apart = [
        difference(questions, answers)
        for answers in all_answers(questions, args.predictions, args.rounds)
    ]
    finish(
        [] if max(apart) <= MOST else ["equal scores"],
        benchmark="score_check",
        largest_difference=max(apart),
        limit=MOST,
        questions=len(questions),
        scored=len(apart),
        own_predictions=args.predictions is not None,
    )


if __name__ == "__main__":
    main()
