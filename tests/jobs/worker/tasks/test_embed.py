"""`train embed`: gradients over all ranks, scores, and folders that sentence-transformers loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.worker.runtime.errors import DatasetError, ModelError
from jobs.worker.runtime.ranks import Ranks, join
from jobs.worker.tasks.embed.task import Embed, EmbedOptions
from jobs.worker.tasks.predict import predict
from jobs.worker.training.batches import TrainingRun
from jobs.worker.training.model import save_model
from jobs.worker.training.optimizer_step import StepTimer, compute_gradients, prepare
from jobs.worker.training.options import SMALL
from jobs.worker.training.scores import rank_candidates
from tests.jobs.worker.fast.test_communication import run_script
from tests.jobs.worker.forked_ranks import run_forked
from tests.jobs.worker.threaded_ranks import run_threaded, session

RANK = """
import sys, torch
from jobs.worker.runtime.ranks import join
from tests.jobs.worker.tasks.test_embed import CASES, gradients

folder, = sys.argv[1:]
with join("gloo") as ranks:
    torch.save([gradients(ranks, folder, *case) for case in CASES], f"{folder}/{ranks.rank}.pt")
"""
# With 30 samples, as on the ranks of a run that continues on fewer, two ranks have one less.
CASES = ((32, "pairs"), (30, "triplets"))
SUBJECTS = ("a rain", "snow", "wind", "sun", "frost")


def gradients(ranks: Ranks, folder: str, count: int, rows: str) -> dict[str, Any]:
    """Return the gradients, and this rank's part of the loss, of a batch of all ranks."""
    torch.manual_seed(1)
    data, given = f"{folder}/{rows}.jsonl", {**SMALL, "batch_size": 32 // ranks.size}
    task = Embed(EmbedOptions(data=data, token_cache="none", wire="fp32", **given))
    context = session(task.options, ranks)
    records = task.read(lambda _: None)
    loaded = task.load(context, records)
    run = TrainingRun(context, task, loaded, task.prepare(context, loaded, records.train))
    model, _ = prepare(run, steps=1)
    loss = compute_gradients(run, model, run.batch(np.arange(count)), StepTimer())
    found = {name: each.grad for name, each in loaded.model.named_parameters()}
    return {**found, "loss": loss}


def write_rows(path: Path, *, negatives: bool) -> None:
    """Write 32 groups of texts with different lengths, some of which are equal."""
    rows = []
    for number in range(32):
        subject = SUBJECTS[number % 5]
        row = {"anchor": f"what about {subject} {'now ' * (number % 4)}{number // 2}"}
        row["positive"] = f"{subject} falls {'again and ' * (number % 3)}on day {number // 4}"
        if negatives:
            row["negative"] = f"{SUBJECTS[(number + 1) % 5]} never falls on day {number}"
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows))


def test_four_ranks_have_the_gradients_of_one(tmp_path: Path) -> None:
    for _, rows in CASES:
        write_rows(tmp_path / f"{rows}.jsonl", negatives=rows == "triplets")
    run_script(4, 1, str(tmp_path), script=RANK)
    with join("gloo", {}) as ranks:
        ones = [gradients(ranks, str(tmp_path), *case) for case in CASES]
    found = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(4)), strict=True)
    for one, four in zip(ones, found, strict=True):
        assert sum(each.pop("loss") for each in four) == pytest.approx(one.pop("loss"), abs=1e-6)
        assert max(float(each.abs().max()) for each in one.values()) > 0.01
        for name, gradient in one.items():
            for each in four:
                assert torch.allclose(each[name], gradient, rtol=0, atol=1e-6), name


def test_ranks_of_candidates_with_ties_and_several_right_ones() -> None:
    anchors = np.array([[1, 0], [0, 1], [1, 1]], dtype=np.float32)
    candidates = np.array([[1, 0], [0, 1], [2, 0], [0.5, 0]], dtype=np.float32)
    rows, wanted = np.array([0, 0, 1, 2]), np.array([0, 3, 1, 0])
    ranks, best = rank_candidates(anchors, candidates, rows, wanted)
    # The last anchor has the same score for the first two candidates.
    assert ranks.tolist() == [2, 3, 1, 3]
    assert best.tolist() == [2, 1, 2]


def train(folder: Path, **options: Any) -> dict[str, Any]:
    chosen = replace(Embed.demo, dtype="fp32", output=str(folder / "out"), **options)
    (ran,) = run_forked([(chosen, {"ranks": 2})])
    assert ran.codes == [0, 0], ran.texts
    result: dict[str, Any] = json.loads((folder / "out" / "results.json").read_text())
    return result


@pytest.mark.filterwarnings("ignore")  # those of other packages that it imports
def test_sentence_transformers_computes_the_same(node: Path, node_environ: dict[str, str]) -> None:
    """Also the scores, on the same texts."""
    result = train(node, epochs=10, max_length=16)
    lines = Path(str(Embed.demo.data)).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    anchors, subjects = [row["text"] for row in rows], sorted({row["label"] for row in rows})
    config = json.loads((node / "out/model/config.json").read_text())
    assert config["data_columns"] == {"text": "text"}, "for `predict --data`"
    vectors = predict(node / "out" / "model", [{"text": text} for text in (*anchors, *subjects)])
    own = torch.tensor([each["embedding"] for each in vectors])

    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import cos_sim

    theirs = SentenceTransformer(str(node / "out" / "model"), device="cpu")
    found = theirs.encode([*anchors, *subjects], convert_to_tensor=True)
    # `predict` computes in bf16 where that is faster.
    assert torch.nn.functional.cosine_similarity(found, own).min() > 0.999

    scores = cos_sim(found[: len(anchors)], found[len(anchors) :])
    truth = torch.tensor([subjects.index(row["label"]) for row in rows])
    places = 1 + (scores > scores.gather(1, truth[:, None])).sum(dim=1)
    known = dict(zip(anchors, (1 / places).tolist(), strict=True))  # equal anchors count once
    assert result["scores"]["mrr"] == pytest.approx(100 * np.mean([*known.values()]), abs=0.01)
    assert result["candidates"] == len(subjects)
    assert result["scores"]["recall_at_1"] > 60, "by chance, 17"


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode_cls_token": True}, {"pooling_mode": "cls"}, {"pooling_mode": "max"}]
)
@pytest.mark.filterwarnings("ignore")  # those of other packages that it imports
def test_pooling_and_prompts_of_the_base_are_kept(tmp_path: Path, pooling: dict[str, Any]) -> None:
    from sentence_transformers import SentenceTransformer

    def work(ranks: Ranks) -> None:
        task = Embed(replace(Embed.demo, model=model, max_length=16))
        context = session(task.options, ranks)
        save_model(folder, task.load(context, task.read(lambda _: None)))

    model, folder, prompts = "scratch", tmp_path / "base", {"query": "Represent this: "}
    folder.mkdir()
    run_threaded(1, work)
    model = str(folder / "model")
    size = {"word_embedding_dimension": 128}
    (folder / "model/1_Pooling/config.json").write_text(json.dumps({**size, **pooling}))
    (folder / "model/config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts})
    )
    folder = tmp_path / "tuned"
    folder.mkdir()
    if pooling == {"pooling_mode": "max"}:
        with pytest.raises(
            ModelError, match="the model's pooling is 'max'; `embed` has mean and cls"
        ):
            run_threaded(1, work)
        return
    run_threaded(1, work)
    theirs = SentenceTransformer(str(folder / "model"), device="cpu")
    assert theirs.prompts["query"] == prompts["query"]
    texts = ["one text", "another longer text"]
    own = predict(folder / "model", [{"text": text} for text in texts])
    vectors = torch.tensor([each["embedding"] for each in own])
    found = theirs.encode(texts, convert_to_tensor=True)
    assert torch.nn.functional.cosine_similarity(found, vectors).min() > 0.999


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("question\nwhy", {}, "has one column, question, and two are needed"),
        ("query,positive,negative\nwhy,because,", {}, "line 2: column 'negative' is empty"),
        ("query,answer\nwhy,because\nhow,because", {}, "all its pairs have the same second text"),
        ("query,answer\nwhy,so", {"negative_column": "bad"}, "has no column 'bad'"),
    ],
)
def test_what_data_lack(tmp_path: Path, content: str, options: Any, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(DatasetError) as refused:
        Embed(EmbedOptions(data=str(path), **options)).read(lambda _: None)
    assert message in refused.value.message


def test_a_batch_can_not_be_split() -> None:
    with pytest.raises(ValueError, match="--accumulate: `embed` needs whole batches"):
        EmbedOptions(accumulate=2)
