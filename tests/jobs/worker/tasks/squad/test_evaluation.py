"""Evaluation on many ranks gives the results of one rank, bit for bit."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jobs.worker.data.tokens import Longs
from jobs.worker.runtime.context import RankContext
from jobs.worker.runtime.events import Events
from jobs.worker.runtime.precision import Precision
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.tasks.squad.answers import Spans, answers, best_spans, predict, run_windows
from jobs.worker.tasks.squad.dataset import Answer, Question
from jobs.worker.tasks.squad.features import Features, build_features
from jobs.worker.tasks.squad.task import DEMO, Squad, SquadOptions
from jobs.worker.training.evaluation import BATCH_TOKENS, deal_batches, plan_batches
from jobs.worker.training.options import NO_CACHE
from jobs.worker.training.task import Loaded
from tests.jobs.worker.threaded_ranks import run_threaded

OPTIONS = replace(DEMO, max_length=64, stride=16, token_cache=NO_CACHE)


@pytest.fixture(scope="module")
def loaded(tokenizer: Any) -> Loaded:
    """A model with random weights, so that any difference shows."""
    import torch
    from transformers import DistilBertConfig, DistilBertForQuestionAnswering

    torch.manual_seed(3)
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=32, n_layers=2, n_heads=2, hidden_dim=64
    )
    return Loaded(DistilBertForQuestionAnswering(config), tokenizer)


@pytest.fixture(scope="module")
def features(questions: list[Question], tokenizer: Any) -> Features:
    return build_features(questions, tokenizer, OPTIONS.max_length, OPTIONS.stride)


def session(ranks: Ranks, dtype: str = "fp32", **options: Any) -> RankContext[SquadOptions]:
    events = Events(ranks.rank, io.StringIO())
    return RankContext(replace(OPTIONS, **options), ranks, events, Precision(dtype, "test"))


def answer(
    context: RankContext[SquadOptions], loaded: Loaded, questions: list[Question]
) -> dict[str, str]:
    features = Squad(context.options).prepare(context, loaded, questions)
    return predict(context, loaded, questions, features)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_many_ranks_answer_as_one(loaded: Loaded, questions: list[Question], dtype: str) -> None:
    (alone,) = run_threaded(1, lambda ranks: answer(session(ranks, dtype), loaded, questions))
    assert list(alone) == [question.id for question in questions]
    assert len(set(alone.values())) > 20
    for size in (2, 3, 5):
        shares = run_threaded(size, lambda ranks: answer(session(ranks, dtype), loaded, questions))
        assert all(share == alone for share in shares), f"{size} ranks"


def test_ranks_that_are_done_get_messages_from_the_others(
    loaded: Loaded, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    (alone,) = run_threaded(1, lambda ranks: answer(session(ranks), loaded, questions))
    monkeypatch.setattr("jobs.worker.training.evaluation.TALK_SECONDS", 0.01)
    shares = run_threaded(3, lambda ranks: answer(session(ranks), loaded, questions))
    assert all(share == alone for share in shares)


def test_the_logits_of_every_window_are_the_same_bits(loaded: Loaded, features: Features) -> None:
    def scores(shares: list[list[Longs]]) -> Spans:
        parts = [
            (batch.chosen, best_spans(batch.start, batch.end, features.take(batch.chosen)))
            for share in shares
            for batch in run_windows(loaded, features, share, session_alone().autocast())
        ]
        chosen = np.concatenate([indices for indices, _ in parts])
        return Spans.join([spans for _, spans in parts]).take(np.argsort(chosen))

    batches = plan_batches(features.lengths)
    alone = scores([batches])
    for ranks in (2, 7):
        for one, other in zip(
            scores(deal_batches(batches, features.lengths, ranks)), alone, strict=True
        ):
            assert np.array_equal(one, other)


def session_alone() -> RankContext[SquadOptions]:
    (found,) = run_threaded(1, session)
    return found


def test_the_batch_size_of_training_does_not_matter(
    loaded: Loaded, questions: list[Question]
) -> None:
    def answers_with(size: int) -> dict[str, str]:
        (found,) = run_threaded(
            1, lambda ranks: answer(session(ranks, batch_size=size), loaded, questions)
        )
        return found

    assert answers_with(1) == answers_with(32)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_no_rank_idles_and_none_misses_a_window(features: Features, ranks: int) -> None:
    batches = plan_batches(features.lengths)
    shares = deal_batches(batches, features.lengths, ranks)
    dealt = np.concatenate([batch for share in shares for batch in share])
    assert sorted(dealt.tolist()) == list(range(len(features)))
    sizes = features.lengths
    loads = [sum(int(sizes[batch].max()) * len(batch) for batch in share) for share in shares]
    assert max(loads) <= 1.1 * min(loads)


def test_batches_are_bounded_and_waste_little(features: Features) -> None:
    sizes = features.lengths
    padded = [int(sizes[batch].max()) * len(batch) for batch in plan_batches(features.lengths)]
    assert max(padded) <= BATCH_TOKENS
    assert sum(padded) <= 1.1 * sizes.sum()


def test_every_question_gets_an_answer_even_a_skipped_one(
    loaded: Loaded, questions: list[Question]
) -> None:
    bad = Question("long", "which core? " * 80, "eight cores", (Answer("eight", 0),))
    (found,) = run_threaded(
        1,
        lambda ranks: answer(session(ranks, skip_bad_records=True), loaded, [bad, *questions[:3]]),
    )
    assert [*found] == ["long", *(question.id for question in questions[:3])]
    assert found["long"] == ""


def test_without_windows_all_answers_are_empty(
    features: Features, questions: list[Question]
) -> None:
    nothing = features.take(np.zeros(0, dtype=np.int64))
    assert plan_batches(nothing.lengths) == []
    assert set(answers(questions, nothing, []).values()) == {""}
