"""`train score`: numbers and rankings, their scores, and folders that CrossEncoder loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from jobs.worker.data.groups import Group
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.tasks.classify import Classify
from jobs.worker.tasks.predict import load_trained, predict
from jobs.worker.tasks.score import Score, Scored, ScoreOptions, is_ranking
from jobs.worker.training.model import load_pretrained, write_model
from jobs.worker.training.options import NO_CACHE, SCRATCH, SMALL
from jobs.worker.training.scores import score_numbers, score_rankings
from jobs.worker.training.task import Task
from tests.jobs.worker.forked_ranks import run_forked
from tests.jobs.worker.tasks.test_classify_and_tag import prepare, write
from tests.jobs.worker.tasks.test_continued_models import save_classifier
from tests.jobs.worker.threaded_ranks import run_threaded, session

SUBJECTS = ("rain", "snow", "wind", "sun")
RANKED = [
    {
        "query": f"what about {subject} {number}",
        "pos": [f"{subject} falls on day {number}"],
        "neg": [f"{other} falls" for other in SUBJECTS[: 1 + number % 3] if other != subject]
        or ["nothing falls today"],
    }
    for number in range(6)
    for subject in SUBJECTS
]


def train(task: type[Task[Any]], folder: Path, **options: Any) -> dict[str, Any]:
    """Train on two ranks; return the results and the first rank's log."""
    chosen = replace(task.demo, dtype="fp32", output=str(folder / "out"), **options)
    (ran,) = run_forked([(chosen, {"ranks": 2})])
    assert ran.codes == [0, 0], ran.texts
    return {**json.loads((folder / "out/results.json").read_text()), "log": ran.texts[0]}


def ranking(data: str, **more: Any) -> Score:
    given: dict[str, Any] = {**SMALL, "token_cache": NO_CACHE, **more}
    return Score(ScoreOptions(data=data, objective="ranking", **given))


@pytest.mark.filterwarnings("ignore")  # those of other packages that it imports
@pytest.mark.parametrize("objective", ["regression", "ranking"])
def test_a_trained_model_is_a_cross_encoder(
    node: Path, node_environ: dict[str, str], objective: str
) -> None:
    options: dict[str, Any] = {"objective": objective, "epochs": 30, "learning_rate": 0.006}
    if objective == "ranking":
        options["epochs"] = 12
        options["data"] = write(node, RANKED)
        pairs = [(row["query"], text) for row in RANKED for text in (*row["pos"], *row["neg"])]
    else:
        lines = Path(str(Score.demo.data)).read_text().splitlines()[1:]
        pairs = [(line.partition(",")[0], f"week {n % 3}") for n, line in enumerate(lines)]
        rows = [
            {"sentence1": text, "sentence2": pair, "score": line[-1]}
            for (text, pair), line in zip(pairs, lines, strict=True)
        ]
        options["data"] = write(node, rows)
    result = train(Score, node, **options)
    inputs = [{"text": text, "pair": pair} for text, pair in pairs]
    own = [each["score"] for each in predict(node / "out" / "model", inputs)]

    assert is_ranking(load_trained(str(node / "out" / "model"))[1]) == (objective == "ranking")

    from sentence_transformers import CrossEncoder

    theirs = CrossEncoder(str(node / "out" / "model"), device="cpu")
    # `predict` computes in bf16 where that is faster.
    assert theirs.predict(pairs) == pytest.approx(np.array(own), abs=0.05)
    assert theirs.max_seq_length == Score.demo.max_length
    if objective == "regression":
        assert result["scores"]["mse"] < 1.0, "the mean of all numbers is off by 2"
        assert result["scores"]["spearman"] > 60
    else:
        assert result["scores"]["mrr"] > 80, "by chance, about 65"
        assert result["queries"] == len(RANKED)
    config = json.loads((node / "out/model/config.json").read_text())
    columns = ("query", "pos") if objective == "ranking" else ("sentence1", "sentence2")
    expected = dict(zip(("text", "pair"), columns, strict=True))
    assert config["data_columns"] == expected, "for `predict --data`"


def test_the_loss_of_a_ranking_is_that_of_its_positives_among_their_negatives(
    tmp_path: Path,
) -> None:
    task = ranking(write(tmp_path, RANKED[:3]))
    loaded, _ = prepare(task)
    row = {"query": "q", "positive": "yes", "negative": "no", "negative_1": "not now"}
    wide = ranking(write(tmp_path, [row])).read(lambda _: None).train
    assert wide == [Group(("q", "yes", "no", "not now"))]
    groups = [*wide, Group(("r", "all", "none")), Group(("r", "some", "none"))]

    def work(ranks: Ranks) -> Any:
        return task.prepare(session(task.options, ranks), loaded, groups)

    (samples,) = run_threaded(1, work)
    batch = task.collate([*map(samples.__getitem__, range(3))], loaded)
    model = loaded.model.eval()
    losses = []
    for group in groups:
        pairs = loaded.tokenizer(
            [group.texts[0]] * (len(group.texts) - 1),
            list(group.texts[1:]),
            padding=True,
            return_tensors="pt",
        )
        losses.append(cross_entropy(model(**pairs).logits.T, torch.tensor([0])))
    assert task.loss(model, batch).item() == pytest.approx(
        torch.stack(losses).mean().item(), abs=1e-5
    )


def test_scores_of_numbers_and_rankings() -> None:
    records = [Scored(("t",), float(n)) for n in (1, 2, 3)]
    figures, rows = score_numbers(records, np.array([1, 2, 6], np.float32))
    assert figures == {"spearman": 100.0, "pearson": pytest.approx(94.491), "mse": 3.0}
    assert rows[2] == {"score": 3.0, "predicted": 6.0}
    assert score_numbers(records, np.ones(3, np.float32))[0]["spearman"] == 0.0
    # The query's candidates are those of both groups, and the equal one counts before a positive.
    groups = [Group(("q", "a", "x", "y")), Group(("q", "b", "z")), Group(("r", "c", "x"))]
    values = np.array([0.5, 0.9, 0.1, 0.2, 0.5, 2.0, 1.0], np.float32)
    figures, rows = score_rankings(groups, values)
    assert rows == [{"query": "q", "rank": 3, "best": "x"}, {"query": "r", "rank": 1, "best": "c"}]
    gains = (1 / np.log2(4) + 1 / np.log2(5)) / (1 + 1 / np.log2(3))
    assert figures["mrr"] == pytest.approx(100 * (1 / 3 + 1) / 2, abs=1e-3)
    assert figures["ndcg_at_10"] == pytest.approx(100 * (gains + 1) / 2, abs=1e-3)


def test_a_model_with_one_output_keeps_its_head_and_is_no_classifier(
    tmp_path: Path, tokenizer: Any
) -> None:
    weights = save_classifier(tmp_path / "model", tokenizer, "classify", ["relevance"])
    data = write(tmp_path, [{"text": "tile", "score": 1}, {"text": "core", "score": 2.5}])
    options = ScoreOptions(
        data=data, model=str(tmp_path / "model"), token_cache=NO_CACHE, max_length=32
    )
    loaded, _ = prepare(Score(options))
    assert torch.equal(loaded.model.classifier.weight, weights)
    assert loaded.new_weights == ()
    assert load_trained(str(tmp_path / "model"))[0] is Score
    save_classifier(tmp_path / "other", tokenizer, "classify", ["a", "b"])
    assert load_trained(str(tmp_path / "other"))[0] is Classify
    settings = {"num_labels": 1, "problem_type": "regression"}
    renewed = load_pretrained(str(tmp_path / "other"), Score.head, settings)
    assert renewed.new_weights == ("classifier.bias", "classifier.weight")


def test_bf16_rounds_no_score(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tasks.predict", "training.evaluation"):
        monkeypatch.setattr(f"jobs.worker.{name}.choose_here", lambda: "bf16")
    save_classifier(tmp_path / "base", tokenizer, "classify", ["year"])
    rows = [{"text": f"tile {n} " * (1 + n % 7), "score": 2000} for n in range(100)]
    for model in (SCRATCH, str(tmp_path / "base")):
        chosen = {**SMALL, "model": model, "max_length": 32, "token_cache": NO_CACHE}
        task = Score(ScoreOptions(data=write(tmp_path, rows), **chosen))
        loaded, samples = prepare(task)
        loaded.model.classifier.bias.data.fill_(2000)
        loaded.model.classifier.weight.data *= 300
        write_model(tmp_path / "model", loaded)

        def evaluate(ranks: Ranks, ask: Any = (task, loaded, samples)) -> Any:
            task, loaded, samples = ask
            return task.compute_outputs(session(task.options, ranks, dtype="bf16"), loaded, samples)

        (outputs,) = run_threaded(1, evaluate)
        found = [each["score"] for each in predict(tmp_path / "model", rows)]
        assert len({*found}) > 30, "in bf16, numbers near 2,000 are multiples of 8"
        assert outputs[:, 0] == pytest.approx(np.array(found), abs=1)


@pytest.mark.parametrize(
    ("header", "text", "pair"),
    [
        ("sentence1,sentence2 ,score", "sentence1", "sentence2 "),
        ("query,document,score", "query", "document"),
        ("question, answer,score", "question", " answer"),
        ("sentence,id,score", "sentence", None),
    ],
)
def test_second_texts_are_found_by_name(
    tmp_path: Path, header: str, text: str, pair: str | None
) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\na,b,1\nc,d,2\n")
    found = Score(ScoreOptions(data=str(tmp_path / "a.csv"))).read(lambda _: None)
    assert found.columns == {"text": text, **({"pair": pair} if pair else {})}
    assert found.train[0].texts == (("a", "b") if pair else ("a",))
