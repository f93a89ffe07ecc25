"""When a run is evaluated while training, and which of its models it keeps."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from jobs.worker.runtime.context import RankContext
from jobs.worker.runtime.errors import DatasetError, TrainingError
from jobs.worker.runtime.ranks import join
from jobs.worker.tasks.classify import Classify, ClassifyOptions
from jobs.worker.tasks.digits import Digits, DigitsOptions
from jobs.worker.tasks.lm.model import LmOptions
from jobs.worker.tasks.score import ScoreOptions
from jobs.worker.tasks.squad.task import DEMO, Squad
from jobs.worker.training.batches import SampleList, Schedule, TrainingRun
from jobs.worker.training.best import Evaluator, Unseen, plan_evaluation
from jobs.worker.training.losses import mean_loss
from jobs.worker.training.state import State, TrainingProgress
from jobs.worker.training.task import FILES, Loaded
from jobs.worker.training.text_task import class_weights
from tests.jobs.worker.forked_ranks import events_of
from tests.jobs.worker.threaded_ranks import session

Run = tuple[RankContext[Any], io.StringIO]


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    printed = io.StringIO()
    with join("gloo", environ={}) as ranks:
        yield session(DigitsOptions(), ranks, printed, output=tmp_path), printed


@dataclass
class Scripted(Digits):
    """A task whose evaluations have given accuracies, and draw random numbers."""

    options: Any
    accuracies: list[float]

    def evaluate(self, context: Any, loaded: Loaded, records: Any, samples: Any) -> dict[str, Any]:
        torch.rand(1), np.random.rand(), random.random()
        assert not loaded.model.training
        context.events.note("a remark of the final evaluation only")
        (context.output / "other").write_text("")
        accuracy = self.accuracies.pop(0)
        return {"accuracy": accuracy, "classes": 10, **{key: [accuracy] for key in FILES}}


def evaluator(context: RankContext[Any], accuracies: list[float], **options: Any) -> Evaluator:
    chosen = DigitsOptions(**options)
    loaded = Loaded(torch.nn.Linear(1, 1))
    run = TrainingRun(
        replace(context, options=chosen), Scripted(chosen, accuracies), loaded, SampleList([[0]])
    )
    return Evaluator(run, Unseen((), SampleList(), is_other=True), every=2, total=7)


def weight_of(model: torch.nn.Module) -> float:
    return float(next(model.parameters()).detach())


@pytest.mark.parametrize(
    ("options", "kept", "model_step", "final"),
    [
        ({}, 2.0, 2, 12.0),
        # The last evaluation is not repeated.
        ({"keep": "last"}, 7.0, 7, 45.0),
        ({"patience": 2}, 2.0, 2, 12.0),
    ],
)
def test_the_first_of_the_best_models_is_kept(
    context: Run, options: dict[str, Any], kept: float, model_step: int, final: float
) -> None:
    rank, printed = context
    judge = evaluator(rank, [50.0, 50.0, 40.0, 45.0, 12.0], **options)
    model = judge.run.loaded.model
    state = State(model, torch.optim.SGD(model.parameters()), {})
    progress, ends = TrainingProgress(), []
    for progress.step in range(1, 8):
        with torch.no_grad():
            model.weight.fill_(progress.step), model.bias.zero_()
        if judge.is_due(progress):
            before = torch.get_rng_state(), np.random.get_state(), random.getstate()
            judge.evaluate(progress, state)
            after = torch.get_rng_state(), np.random.get_state(), random.getstate()
            assert repr(before) == repr(after)
            assert model.training
            assert not judge.is_due(progress), "twice"
        ends.append(judge.is_exhausted(progress))
    assert [each["step"] for each in progress.evaluations] == [2, 4, 6, 7]
    assert ends.index(True) == 5 if options.get("patience") else not any(ends)
    begun = events_of(printed.getvalue(), "evaluating")
    assert [each["step"] for each in begun] == [2, 4, 6, 7]
    shown = events_of(printed.getvalue(), "evaluation")
    assert [each["best"] for each in shown] == [True, False, False, False]
    assert shown[0]["scores"] == {"accuracy": 50.0}
    assert [(e["score"], e["best_score"], e["best_step"]) for e in shown] == [
        (score, 50.0, 2) for score in (50.0, 50.0, 40.0, 45.0)
    ]
    assert not list(rank.output.iterdir())

    judge.take_best(progress, state)
    assert (weight_of(model), progress.model_step) == (kept, model_step)
    assert "remark" not in printed.getvalue()
    model.eval()
    assert judge.evaluate_model(progress)["accuracy"] == final
    for each in FILES:
        assert json.loads((rank.output / f"{each}.json").read_text()) == [final]
    notes = events_of(printed.getvalue(), "note")
    assert len(notes) == 1 + (model_step < 7) + bool(options.get("patience"))


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        (LmOptions(), [{"perplexity": 9.0}, {"perplexity": 3.0}]),
        # Two of them are equal, and the order is right long before the numbers are.
        (ScoreOptions(), [{"spearman": 98.5, "pearson": 99.0, "mse": mse} for mse in (0.07, 0.01)]),
    ],
)
def test_a_lower_score_may_be_better_and_others_decide_between_equal_ones(
    context: Run, options: Any, scores: list[dict[str, float]]
) -> None:
    judge = evaluator(context[0], [])
    run = replace(judge.run, context=replace(judge.run.context, options=options))
    rows = [{"step": 2 * (n + 1), **each} for n, each in enumerate(scores)]
    best = replace(judge, run=run).best(TrainingProgress(evaluations=rows))
    assert best is not None
    assert best["step"] == 4


@pytest.mark.parametrize(
    ("options", "unseen", "other", "every", "said"),
    [
        ({}, 100, True, 5, "evaluation after each epoch, in about 3.3 % of the time"),
        ({}, 301, True, 0, "it would take about 10 % of the time"),
        ({"eval_every": "epoch"}, 900, True, 5, ""),
        ({"patience": 1}, 900, True, 5, ""),
        ({"eval_every": "3"}, 900, True, 3, ""),
        ({"eval_every": "never"}, 100, True, 0, ""),
        ({"epochs": 0}, 100, True, 0, ""),
        ({}, 100, False, 0, ""),
    ],
)
def test_by_default_a_cheap_evaluation_follows_each_epoch(
    context: Run, options: dict[str, Any], unseen: int, other: bool, every: int, said: str
) -> None:
    rank, printed = context
    chosen = DigitsOptions(**options)
    own = replace(rank, options=chosen)
    run = TrainingRun(own, Digits(chosen), Loaded(None), SampleList([[0] * 10] * 100))
    data = Unseen((), SampleList([[0]] * unseen), is_other=other)
    assert plan_evaluation(run, data, Schedule(5, 10, 0)).every == every
    notes = [each["text"] for each in events_of(printed.getvalue(), "note")]
    assert said in "".join(notes)
    assert bool(notes) == bool(said)


@pytest.mark.parametrize("options", [{"eval_every": "epoch"}, {"patience": 3}])
def test_evaluations_need_other_data(tmp_path: Path, options: dict[str, Any]) -> None:
    data = tmp_path / "data.csv"
    data.write_text("text,label\none,a\ntwo,b\nthree,a\nfour,b\n")
    task = Classify(ClassifyOptions(data=str(data), **options))
    with pytest.raises(DatasetError, match="need data that the model is not trained on"):
        task.check()
    Classify(replace(task.options, eval_fraction=0.25)).check()
    squad = Squad(replace(DEMO, **options))
    with pytest.raises(DatasetError, match="need data that the model is not trained on"):
        squad.check()


def test_a_metric_that_the_data_lack_is_an_error(context: Run) -> None:
    judge = evaluator(context[0], [])
    options = ClassifyOptions(metric="exact_match")
    run = replace(judge.run, context=replace(judge.run.context, options=options))
    progress = TrainingProgress(evaluations=[{"step": 2, "accuracy": 1.0, "macro_f1": 1.0}])
    with pytest.raises(TrainingError, match="no such score, only accuracy, macro_f1"):
        replace(judge, run=run).best(progress)


def test_class_weights_and_smoothing_are_torchs() -> None:
    logits, labels = torch.randn(6, 3), torch.tensor([0, 2, 2, 1, 2, -100])
    for weights in (None, [0.5, 2.0, 1.5]):
        of_class = None if weights is None else torch.tensor(weights)
        for smoothing in (0.0, 0.2):
            expected = cross_entropy(logits, labels, of_class, label_smoothing=smoothing)
            found = mean_loss(logits, labels, weights, smoothing)
            assert float(found) == pytest.approx(float(expected), rel=1e-6)
    nothing = mean_loss(logits, torch.full((6,), -100), [1.0, 1.0, 1.0], 0.1)
    assert float(nothing) == 0.0


def test_class_weights_of_data_and_files(tmp_path: Path) -> None:
    counts, file = {"ham": 6, "spam": 2}, tmp_path / "weights.json"
    # As scikit-learn's compute_class_weight; the last class is one that only the model has.
    balanced = class_weights("balanced", ["ham", "spam", "old"], counts)
    assert balanced == [pytest.approx(4 / 6), 2.0, 1.0]
    assert class_weights(None, ["ham", "spam"], counts) is None
    file.write_text('{"ham": 1, "spam": 2.5}', encoding="utf-8-sig")
    assert class_weights(str(file), ["ham", "spam"], counts) == [1.0, 2.5]
    for content, message in (
        ("{", "can't be read: "),
        ("[1, 2]", "is not an object"),
        ('{"ham": 1}', "has no weight for class 'spam'"),
        ('{"ham": 1, "spam": "2"}', "has '2', which is not a positive number, for class 'spam'"),
        ('{"ham": 1, "spam": 0}', "has 0, which is not a positive number"),
        ('{"ham": 1, "spam": 2, "eggs": 3}', "the data have no class 'eggs'"),
    ):
        file.write_text(content)
        with pytest.raises(DatasetError, match=message):
            class_weights(str(file), ["ham", "spam"], counts)


def test_weights_count_over_ranks_and_several_labels_have_none(tmp_path: Path) -> None:
    rows = [{"text": f"t{n}", "label": "a" if n else "b"} for n in range(4)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    task = Classify(ClassifyOptions(data=str(data), class_weights="balanced"))
    task.read(lambda _: None)

    class Targets:
        targets = np.array([1, 0, 0, 0])

    found = task.weights(Targets())
    assert found is not None
    assert found.tolist() == [2.0, *[pytest.approx(2 / 3)] * 3]
    data.write_text('{"text": "t", "label": ["a", "b"]}\n{"text": "u", "label": ["a"]}')
    with pytest.raises(DatasetError, match="need texts with one label each"):
        Classify(ClassifyOptions(data=str(data), label_smoothing=0.1)).read(lambda _: None)
