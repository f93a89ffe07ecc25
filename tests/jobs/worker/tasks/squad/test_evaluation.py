"""Evaluation on many ranks gives the results of one rank, bit for bit."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from jobs.worker.runtime.context import RankContext
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.tasks.predict import load_trained
from jobs.worker.tasks.predict import predict as predict_rows
from jobs.worker.tasks.squad.answers import NO_SPAN, ask, predict
from jobs.worker.tasks.squad.dataset import Answer, Question
from jobs.worker.tasks.squad.features import Features, build_features
from jobs.worker.tasks.squad.metrics import Answers, normalize, score_v2
from jobs.worker.tasks.squad.task import DEMO, Squad, SquadOptions
from jobs.worker.training.evaluation import BATCH_TOKENS, deal_batches, plan_batches
from jobs.worker.training.model import save_model
from jobs.worker.training.options import NO_CACHE
from jobs.worker.training.task import FILES, Data, Loaded
from tests.jobs.worker import threaded_ranks
from tests.jobs.worker.threaded_ranks import run_threaded

OPTIONS = replace(DEMO, max_length=64, stride=16, token_cache=NO_CACHE)


@pytest.fixture(scope="module")
def features(questions: list[Question], tokenizer: Any) -> Features:
    return build_features(questions, tokenizer, OPTIONS.max_length, OPTIONS.stride)


def session(ranks: Ranks, dtype: str = "fp32", **options: Any) -> RankContext[SquadOptions]:
    return threaded_ranks.session(replace(OPTIONS, **options), ranks, dtype=dtype)


def answer(
    context: RankContext[SquadOptions], loaded: Loaded, questions: list[Question]
) -> Answers:
    features = Squad(context.options).prepare(context, loaded, questions)
    return predict(context, loaded, questions, features)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_many_ranks_answer_as_one(
    loaded: Loaded, questions: list[Question], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch size of training does not matter either, nor how often the ranks send messages."""
    (alone,) = run_threaded(1, lambda ranks: answer(session(ranks, dtype), loaded, questions))
    assert list(alone.texts) == [question.id for question in questions]
    assert len(set(alone.texts.values())) > 20
    assert len(set(alone.null_odds.values())) > 20
    for size, seconds in ((2, 60), (5, 0.01)):
        monkeypatch.setattr("jobs.worker.training.evaluation.TALK_SECONDS", seconds)
        shares = run_threaded(
            size,
            lambda ranks: answer(session(ranks, dtype, batch_size=ranks.size), loaded, questions),
        )
        assert all(share == alone for share in shares), f"{size} ranks"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_no_rank_idles_and_none_misses_a_window(features: Features, ranks: int) -> None:
    sizes = features.lengths
    batches = plan_batches(sizes)
    assert plan_batches(sizes[:0]) == []
    shares = deal_batches(batches, sizes, ranks)
    dealt = np.concatenate([batch for share in shares for batch in share])
    assert sorted(dealt.tolist()) == list(range(len(features)))
    loads = [sum(int(sizes[batch].max()) * len(batch) for batch in share) for share in shares]
    assert max(loads) <= 1.1 * min(loads)
    assert max(int(sizes[batch].max()) * len(batch) for batch in batches) <= BATCH_TOKENS
    assert sum(loads) <= 1.1 * sizes.sum(), "little is padding"


def test_every_question_gets_an_answer_even_a_skipped_one(
    loaded: Loaded, questions: list[Question]
) -> None:
    bad = Question("long", "which core? " * 80, "eight cores", (Answer("eight", 0),))
    (found,) = run_threaded(
        1,
        lambda ranks: answer(session(ranks, skip_bad_records=True), loaded, [bad, *questions[:3]]),
    )
    assert [*found.texts] == ["long", *(question.id for question in questions[:3])]
    assert (found.texts["long"], found.null_odds["long"]) == ("", NO_SPAN)


@pytest.fixture(scope="module")
def mixed(loaded: Loaded, questions: list[Question]) -> list[Question]:
    """What the model finds is right for half of the questions; the others have no answer."""
    (found,) = run_threaded(1, lambda ranks: answer(session(ranks), loaded, questions))
    surest = sorted(questions, key=lambda each: found.null_odds[each.id])
    known = {
        each.id: Answer(found.texts[each.id], each.context.index(found.texts[each.id]))
        for n, each in enumerate(surest)
        if (n < len(surest) // 2) != (n % 10 == 0) and normalize(found.texts[each.id])
    }
    return [replace(x, answers=(known[x.id],) if x.id in known else ()) for x in questions]


def evaluate(
    loaded: Loaded, train: list[Question], unseen: list[Question], folder: Path
) -> dict[str, Any]:
    """Return the results that a model has after training without steps, and save it in the folder."""
    task = Squad(replace(OPTIONS, model=str(folder / "before")))
    loaded.model.save_pretrained(folder / "before")
    loaded.tokenizer.save_pretrained(folder / "before")

    def work(ranks: Ranks) -> dict[str, Any]:
        context = replace(session(ranks), output=folder)
        own = task.load(context, Data(train, "", unseen, ""))
        if ranks.first:
            save_model(folder, own)
        return task.evaluate(context, own, unseen, task.prepare(context, own, unseen))

    first, second = run_threaded(2, work)
    assert first == second
    return first


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_threshold_is_fitted_saved_and_used(
    loaded: Loaded, mixed: list[Question], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.worker.runtime.precision.read_cpu_flags", frozenset)
    results = evaluate(loaded, mixed, mixed, tmp_path)
    texts, odds = (results[name] for name in FILES)
    threshold = read(tmp_path / "model" / "config.json")["no_answer_threshold"]
    assert threshold == results["no_answer_threshold"] == results["best_f1_threshold"]
    assert threshold in odds.values()
    assert all((not texts[key]) == (odds[key] > threshold) for key in odds)
    assert 40 < sum(map(bool, texts.values())) < 60
    assert 80 < results["f1"] < 95
    found = score_v2(mixed, Answers(texts, odds), threshold)
    assert {key: results[key] for key in found} == pytest.approx(found, abs=5e-4)
    assert results["f1"] == results["best_f1"]
    assert results["has_answer_total"] + results["no_answer_total"] == len(mixed)
    assert results["scores"] == {
        name: results[name] for name in ("em", "f1", "has_answer_f1", "no_answer_f1")
    }
    _, saved = load_trained(str(tmp_path / "model"))
    for each, again in zip(mixed, ask(saved, mixed), strict=True):
        assert again.null_odds == pytest.approx(odds[each.id], abs=1e-3)
        if abs(odds[each.id] - threshold) > 1e-3:
            assert again.text == texts[each.id]


def test_a_threshold_that_can_not_be_fitted_is_0(
    loaded: Loaded, questions: list[Question], mixed: list[Question], tmp_path: Path
) -> None:
    results = evaluate(loaded, mixed, questions, tmp_path)
    assert read(tmp_path / "model" / "config.json")["no_answer_threshold"] == 0
    assert results["has_answer_total"] == len(questions)
    assert "no_answer_f1" not in results["scores"]


def test_without_such_questions_nothing_is_different(
    loaded: Loaded, questions: list[Question], tmp_path: Path
) -> None:
    # Also if the model has learned from them before.
    loaded.model.config.no_answer_threshold = 1.5
    try:
        results = evaluate(loaded, questions, questions, tmp_path)
    finally:
        del loaded.model.config.no_answer_threshold
    assert [*results] == ["predictions", "em", "f1"]
    assert all(results["predictions"].values())
    assert "no_answer_threshold" not in read(tmp_path / "model" / "config.json")
    (found,) = predict_rows(tmp_path / "model", [{"question": "Why?", "context": "eight cores"}])
    assert [*found] == ["text", "score", "start"]


def mark_whole_passages(_: Any, features: Features, *__: Any) -> Iterator[Any]:
    """Yield the logits of a model whose best answer is always the whole passage."""
    for number in range(len(features)):
        windows = features.take(np.array([number]))
        logits = torch.zeros(2, 1, int(windows.lengths[0]))
        begin, count = int(windows.windows.front[0]), int(windows.windows.width[0])
        logits[0, 0, begin] = logits[1, 0, begin + count - 1] = 9
        output = QuestionAnsweringModelOutput(start_logits=logits[0], end_logits=logits[1])
        yield np.array([number]), output


@pytest.mark.parametrize(("longest", "is_enough"), [(40, False), (120, True)])
def test_answers_can_be_as_long_as_asked_and_longer_ones_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int, is_enough: bool
) -> None:
    """Also in `predict`, from the saved model."""
    monkeypatch.setattr("jobs.worker.tasks.squad.answers.run_batches", mark_whole_passages)
    context = " ".join(["word"] * 50)
    asked = [
        Question("long", "Which words?", context, (Answer(context, 0),)),
        Question("short", "Which word?", context, (Answer("word", 0),)),
    ]
    task, log = Squad(replace(OPTIONS, max_length=384, max_answer_length=longest)), io.StringIO()

    def work(ranks: Ranks) -> str:
        context = threaded_ranks.session(task.options, ranks, log)
        loaded = task.load(context, Data(asked, "", asked, ""))
        features = task.prepare(context, loaded, asked)
        save_model(tmp_path, loaded)
        return predict(context, loaded, asked, features).texts["long"]

    (found,) = run_threaded(1, work)
    _, saved = load_trained(str(tmp_path / "model"))
    assert [found == context, ask(saved, asked)[0].text == context] == [is_enough] * 2
    note = f"1 of 2 questions have answers of more than {longest} tokens"
    assert (note in log.getvalue()) is not is_enough
