"""Digests of samples, which tell a resumed run whether its data have changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jobs.worker.data.tokens import Column, TextSamples, encode, read_template
from jobs.worker.tasks.squad.dataset import Question
from jobs.worker.tasks.squad.features import Features, build_features

TEXTS = ["tile registers", "eight cores", "which tile"]


def samples(tokenizer: Any, texts: list[str], targets: Any) -> TextSamples:
    template = read_template(tokenizer, pair=False)
    return TextSamples(encode([Column(texts, offsets=True)], tokenizer), template, targets, 32)


@pytest.mark.parametrize(
    ("targets", "other"),
    [
        (np.array([0, 1, 1]), np.array([0, 1, 0])),
        ([[0, 1], [], [1]], [[0, 1], [1], []]),
        ([np.array([0, -100]), np.array([1]), np.array([2])], [np.array([0, -100])] * 3),
        (range(3), range(1, 4)),
    ],
)
def test_a_digest_is_of_texts_targets_and_their_order(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, targets: Any, other: Any
) -> None:
    # Ten million samples would take minutes, while other ranks wait.
    monkeypatch.delattr(TextSamples, "__getitem__")
    one = samples(tokenizer, TEXTS, targets)
    assert one.digest() == samples(tokenizer, [*TEXTS], targets).digest()
    changed = [
        samples(tokenizer, TEXTS, other),
        samples(tokenizer, TEXTS[::-1], targets),
        samples(tokenizer, ["tile", "registers eight cores", "which tile"], targets),
        replace(one, max_length=16),
        replace(one, template=read_template(tokenizer, pair=True)),
    ]
    assert len({one.digest(), *(each.digest() for each in changed)}) == 6


def test_a_digest_of_windows_is_of_texts_and_answers(
    questions: list[Question], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Features, "__getitem__")
    one = build_features(questions[:8], tokenizer, 384, 128)
    assert one.digest() == build_features(questions[:8], tokenizer, 384, 128).digest()
    answer = questions[0].answers[0]
    moved = replace(questions[0], answers=(replace(answer, text=answer.text.split()[0]),))
    assert moved != questions[0]
    changed = [[moved, *questions[1:8]], questions[7::-1], questions[:7]]
    digests = {build_features(each, tokenizer, 384, 128).digest() for each in changed}
    assert len(digests - {one.digest()}) == 3


def test_lengths_are_computed_once_per_run(questions: list[Question], tokenizer: Any) -> None:
    from jobs.worker.runtime.context import RankContext
    from jobs.worker.runtime.ranks import Ranks
    from jobs.worker.tasks.squad.task import Squad, SquadOptions
    from jobs.worker.training.batches import TrainingRun
    from jobs.worker.training.task import Loaded

    asked = []

    class Counted(Features):
        @property
        def lengths(self) -> Any:
            asked.append(self)
            return super().lengths

    made = build_features(questions[:8], tokenizer, 384, 128)
    counted = Counted(made.encoded, made.template, made.windows)
    context: Any = RankContext.__new__(RankContext)
    for name, value in {"options": SquadOptions(), "ranks": Ranks()}.items():
        object.__setattr__(context, name, value)
    run = TrainingRun(context, Squad(SquadOptions()), Loaded(None, tokenizer), counted)
    for _ in range(3):
        run.batch(np.arange(4))
    assert len(asked) == 1
