"""`train embed`: gradients over all ranks, scores, and folders that sentence-transformers loads."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from jobs.worker.data import readers
from jobs.worker.data.mapped import Lazy
from jobs.worker.runtime.errors import DatasetError, ModelError
from jobs.worker.runtime.ranks import Ranks, join
from jobs.worker.tasks.embed.encoder import find_pooling, read_declared
from jobs.worker.tasks.embed.losses import compare
from jobs.worker.tasks.embed.negatives import add_negatives, mine
from jobs.worker.tasks.embed.options import EmbedOptions
from jobs.worker.tasks.embed.task import Embed
from jobs.worker.tasks.predict import predict
from jobs.worker.training import model as model_module
from jobs.worker.training import scores
from jobs.worker.training.batches import TrainingRun
from jobs.worker.training.model import save_model
from jobs.worker.training.optimizer_step import StepTimer, compute_gradients, prepare
from jobs.worker.training.options import SMALL
from jobs.worker.training.scores import rank_candidates
from jobs.worker.training.teacher import ask_teacher
from tests.harness.hub import serve_hub
from tests.jobs.worker.fast.test_communication import run_script
from tests.jobs.worker.tasks.test_continued_models import save_with_decoder
from tests.jobs.worker.tasks.test_score import train
from tests.jobs.worker.threaded_ranks import load_run, run_threaded, session
from tests.jobs.worker.tokenizer_families import KINDS

RANK = """
import sys, torch
from jobs.worker.runtime.ranks import join
from tests.jobs.worker.tasks.test_embed import CASES, gradients

folder, = sys.argv[1:]
with join("gloo") as ranks:
    torch.save([gradients(ranks, folder, *case) for case in CASES], f"{folder}/{ranks.rank}.pt")
"""
# As on the ranks of a run that continues on fewer, some ranks have one sample less.
CASES: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (31, "triplets", {"matryoshka": "64,16"}),
    # Groups with different numbers of negatives, and vectors of the same size and another to follow.
    (30, "lists", {"teacher": "same", "distill_alpha": 0.3}),
    (30, "lists", {"teacher": "small", "distill_alpha": 0.3}),
)
SUBJECTS = ("a rain", "snow", "wind", "sun", "frost")


def gradients(
    ranks: Ranks, folder: str, count: int, rows: str, more: dict[str, Any]
) -> dict[str, Any]:
    """Return the gradients, and this rank's part of the loss, of a batch of all ranks."""
    torch.manual_seed(1)
    data, given = f"{folder}/{rows}.jsonl", {**SMALL, "batch_size": -(-32 // ranks.size), **more}
    if "teacher" in given:
        given["teacher"] = f"{folder}/{given['teacher']}/model"
    task = Embed(EmbedOptions(data=data, token_cache="none", wire="fp32", **given))
    context = session(task.options, ranks)
    records = task.read(lambda _: None)
    loaded = task.load(context, records)
    samples = task.prepare(context, loaded, records.train)
    run = TrainingRun(context, task, loaded, samples, ask_teacher(task, context, records.train))
    model, _ = prepare(run, steps=1)
    loss = compute_gradients(run, model, run.batch(np.arange(count)), StepTimer())
    found = {name: each.grad for name, each in loaded.model.named_parameters()}
    return {**found, "loss": loss}


def write_rows(path: Path, rows_of: str) -> None:
    """Write 32 groups of texts with different lengths, some of which are equal."""
    rows = []
    for number in range(32):
        subject = SUBJECTS[number % 5]
        row: dict[str, Any] = {}
        row["anchor"] = f"what about {subject} {'now ' * (number % 4)}{number // 2}"
        row["positive"] = f"{subject} falls {'again and ' * (number % 3)}on day {number // 4}"
        never = [f"{SUBJECTS[(number + n) % 5]} never falls on day {number}" for n in (1, 2, 3)]
        if rows_of == "triplets":
            row["negative"] = never[0]
        if rows_of == "lists":
            row["neg"] = never[: number % 4]
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows))


def save_encoder(folder: Path, data: str, dim: int = 128) -> str:
    """Save a new model with vectors of this size; return its folder."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(model_module.SCRATCH_SHAPE, "dim", dim)
        save_model(folder, load_run(Embed(EmbedOptions(data=data, **SMALL))).loaded)
    return str(folder / "model")


def test_three_ranks_have_the_gradients_of_one(tmp_path: Path) -> None:
    for _, rows, _ in CASES:
        write_rows(tmp_path / f"{rows}.jsonl", rows)
    for name, dim in (("same", 128), ("small", 32)):
        save_encoder(tmp_path / name, str(tmp_path / "lists.jsonl"), dim)
    run_script(3, 1, str(tmp_path), script=RANK)
    with join("gloo", {}) as ranks:
        ones = [gradients(ranks, str(tmp_path), *case) for case in CASES]
    found = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(3)), strict=True)
    for one, three in zip(ones, found, strict=True):
        assert sum(each.pop("loss") for each in three) == pytest.approx(one.pop("loss"), abs=1e-6)
        largest = max(float(each.abs().max()) for each in one.values())
        assert largest > 0.01
        for name, gradient in one.items():
            for each in three:
                atol = 1e-6 * max(1.0, largest)
                assert torch.allclose(each[name], gradient, rtol=0, atol=atol), name


def test_ranks_of_candidates_with_ties_and_several_right_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    anchors = np.array([[1, 0], [0, 1], [1, 1]], dtype=np.float32)
    candidates = np.array([[1, 0], [0, 1], [2, 0], [0.5, 0]], dtype=np.float32)
    rows, wanted = np.array([0, 0, 1, 2]), np.array([0, 3, 1, 0])
    for at_once in (1, 8, 1 << 20):
        monkeypatch.setattr(scores, "_SCORES", at_once)
        whole = rank_candidates(anchors[rows], candidates, wanted)
        # The last anchor has the same score for the first two candidates.
        assert whole.places.tolist() == [2, 3, 1, 3]
        assert whole.best.tolist() == [2, 2, 1, 2]
        twin = whole._replace(best=whole.best + 9)
        assert (twin.merge(whole).best == whole.merge(twin).best).all(), "on any number of ranks"


@pytest.mark.parametrize("prompt", ["", "ask: "])
def test_any_number_of_ranks_finds_the_same_in_a_corpus(tmp_path: Path, prompt: str) -> None:
    write_rows(tmp_path / "rows.jsonl", "pairs")
    passages = [f"{SUBJECTS[n % 5]} falls again on day {n}" for n in range(90)]
    more_texts = [*passages, *passages[:9], "frost falls on day 2", "what about snow now 0"]
    rows = "\n".join(json.dumps({"title": "Day", "text": text}) for text in ("", *more_texts))
    (tmp_path / "more.jsonl").write_text(rows)
    with (tmp_path / "rows.jsonl").open("a") as file:  # each finds the other, and neither itself
        for pair in (("the first", "the second"), ("the second", "the first")):
            file.write("\n" + json.dumps(dict(zip(("anchor", "positive"), pair, strict=True))))
    data, more, notes = str(tmp_path / "rows.jsonl"), str(tmp_path / "more.jsonl"), list[str]()
    asked: Any = {"corpus": more, "query_prompt": prompt or None}
    task = Embed(EmbedOptions(data=data, token_cache="none", **asked, **SMALL))
    with pytest.raises(DatasetError, match="is empty"):
        task.read(notes.append)
    task.options = replace(task.options, skip_bad_records=True)
    read = task.read(notes.append)
    assert notes[-2].endswith("more.jsonl: passages from column 'text', without their titles")
    assert notes[-1].startswith(f"skipped 1 bad record, the first: {more}")
    (loaded,) = run_threaded(1, lambda ranks: task.load(session(task.options, ranks), read))

    def work(ranks: Ranks) -> Any:
        context = session(task.options, ranks)
        samples = task.prepare(context, loaded, read.train)
        first, second = (samples[len(samples) - place].numbers.tolist() for place in (2, 1))
        assert first == second[::-1], "so that no text is a negative of itself"
        return task.evaluate(context, loaded, read.train, samples)

    one, three = run_threaded(1, work)[0], run_threaded(3, work)
    assert three == [one, {}, {}]
    found = one["predictions"]

    positives = {group.texts[1] for group in read.train}
    texts = sorted({*positives, *more_texts})
    assert (one["candidates"], one["anchors"]) == (len(texts), len(found))
    assert "frost falls on day 2" in positives

    def encode(texts: list[str]) -> Any:
        with torch.inference_mode():
            tokens = loaded.tokenizer(texts, padding=True, return_tensors="pt")
            return loaded.model.encode(**{n: tokens[n] for n in ("input_ids", "attention_mask")})

    anchors, candidates = [each["anchor"] for each in found], encode(texts)
    vectors = encode([prompt + each for each in anchors])
    assert "what about snow now 0" in anchors
    for each, similar in zip(found, vectors @ candidates.T, strict=True):
        if each["anchor"] in texts:
            similar[texts.index(each["anchor"])] = -1
        assert texts[int(similar.argmax())] == each["best"]
        right = {group.texts[1] for group in read.train if group.texts[0] == each["anchor"]}
        limit = max(similar[texts.index(text)] for text in right)
        assert each["rank"] == int((similar >= limit - 1e-6).sum())
        ranks = each.get("ranks", [each["rank"]])
        assert (min(ranks), len(ranks)) == (each["rank"], len(right))
    assert "what about snow now 0" in [each["best"] for each in found]


@pytest.mark.filterwarnings("ignore")  # those of other packages that it imports
def test_sentence_transformers_computes_the_same(node: Path, node_environ: dict[str, str]) -> None:
    """Also with prompts, shorter vectors, and other texts than those of the data."""
    from sentence_transformers import SentenceTransformer

    rows = [json.loads(line) for line in Path(str(Embed.demo.data)).read_text().splitlines()]
    anchors, subjects = [row["text"] for row in rows], {row["label"] for row in rows}
    texts = sorted({*subjects, "another text", "and one more"})
    (node / "more.txt").write_text("\n\n".join([*texts, "and one more"]))
    asked = {"query_prompt": "query: ", "passage_prompt": "passage: ", "matryoshka": "16"}
    options = {**asked, "epochs": 6, "max_length": 16, "mine_negatives": 2}
    result = train(Embed, node, corpus=str(node / "more.txt"), **options)
    assert result["candidates"] == len(texts)
    assert re.search(r"negatives that the model found: \d\.\d per anchor", result["log"])
    folder = node / "out" / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["data_columns"] == {"text": "text"}, "for `predict --data`"
    whole, short = (
        SentenceTransformer(str(folder), device="cpu", truncate_dim=size) for size in (None, 16)
    )
    found = whole.encode_query(anchors, convert_to_tensor=True)
    known = whole.encode_document(texts, convert_to_tensor=True)
    prompted = [*(f"query: {text}" for text in anchors), *(f"passage: {text}" for text in texts)]
    vectors = predict(folder, [{"text": text} for text in prompted])
    own = torch.tensor([each["embedding"] for each in vectors])
    # `predict` computes in bf16 where that is faster.
    assert torch.nn.functional.cosine_similarity(torch.cat([found, known]), own).min() > 0.999
    truth = torch.tensor([texts.index(row["label"]) for row in rows])
    assert result["scores"]["recall_at_1"] > 60, "by chance, 12"
    scores = short.similarity(short.encode_query(anchors), short.encode_document(texts))
    assert (scores.argmax(dim=1) == truth).float().mean() > 0.4


@pytest.mark.filterwarnings("ignore")  # those of other packages that it imports
def test_pooling_and_prompts_of_the_base_are_kept(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    def save(name: str, model: str, **asked: Any) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        run = load_run(Embed(replace(Embed.demo, model=model, max_length=16, **asked)))
        save_model(tmp_path / name, run.loaded)
        return tmp_path / name / "model"

    base, prompts = save("base", "scratch"), {"query": "Represent this: "}
    (base / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))

    def pool(**how: Any) -> None:
        config = {"word_embedding_dimension": 128, **how}
        (base / "1_Pooling/config.json").write_text(json.dumps(config))

    pool(pooling_mode="max")
    with pytest.raises(ModelError, match="the model's pooling is 'max'; `embed` has mean and cls"):
        save("other", str(base))
    pool(pooling_mode_cls_token=True)
    whole = (base / "modules.json").read_text()
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    (base / "modules.json").write_text(json.dumps([*json.loads(whole), dense]))
    for use in (partial(save, "other", str(base)), partial(predict, base, [{"text": "a"}])):
        with pytest.raises(ModelError, match="the model also has Dense of sentence-transformers;"):
            use()
    (base / "modules.json").write_text(whole)
    partly = shutil.copytree(base, tmp_path / "partly", ignore=lambda *_: ["1_Pooling"])
    with pytest.raises(ModelError, match=r"is missing, which modules\.json names"):
        predict(partly, [{"text": "a"}])
    tuned = save("tuned", str(base))
    theirs = SentenceTransformer(str(tuned), device="cpu")
    assert theirs.prompts["query"] == prompts["query"]
    texts = ["one text", "another longer text"]
    own = predict(tuned, [{"text": text} for text in texts])
    vectors = torch.tensor([each["embedding"] for each in own])
    found = theirs.encode(texts, convert_to_tensor=True)
    assert torch.nn.functional.cosine_similarity(found, vectors).min() > 0.999
    pool(pooling_mode="mean", include_prompt=False)
    tuned = save("prompted", str(base), query_prompt="a prompt that counts: ")
    own = predict(tuned, [{"text": f"a prompt that counts: {text}"} for text in texts])
    vectors = torch.tensor([each["embedding"] for each in own])
    theirs = SentenceTransformer(str(tuned), device="cpu")
    found = theirs.encode_query(texts, convert_to_tensor=True)
    assert torch.nn.functional.cosine_similarity(found, vectors).min() > 0.999


@pytest.mark.parametrize(("content", "pooling"), [({"pooling_mode": "cls"}, "cls"), ({}, "mean")])
def test_rank_0_reads_the_pooling_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, Any], pooling: str
) -> None:
    constants, said = "huggingface_hub.constants", StringIO()

    def read(cache: str) -> list[str]:
        def work(ranks: Ranks) -> str:
            context = session(Embed.demo, ranks, said if ranks.first else None)
            return find_pooling(read_declared("open/model", context))

        monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / cache))
        return run_threaded(2, work)

    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(f"{constants}.HF_HUB_DISABLE_XET", True)
    with serve_hub() as hub:
        url = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(f"{constants}.ENDPOINT", hub.url)
        monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", url)
        files = {"1_Pooling/config.json": json.dumps(content).encode()} if content else {}
        hub.files["open/model"] = {"config.json": b"{}", **files}
        asked = Mock(side_effect=hub.answer)
        monkeypatch.setattr(hub, "answer", asked)
        assert read("cache") == [pooling] * 2
        paths = [each.args[1] for each in asked.call_args_list]
        count = paths.count("/open/model/resolve/main/1_Pooling/config.json")
        assert count == 1 + bool(content), "by one rank: its size, and the file if there is one"
        monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "other"))
        monkeypatch.setattr(model_module, "load_pretrained", lambda *_: None)
        Embed(replace(Embed.demo, model="open/model")).download()
    monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", True)
    assert read("other") == [pooling] * 2, "from the cache"
    assert said.getvalue() == ""
    assert read("empty") == ["mean"] * 2
    assert said.getvalue().count("1_Pooling/config.json can't be read; using mean pooling") == 1


@pytest.mark.parametrize("rated", ["label,5", "label,Delft", "score,1.0", "similarity,"])
def test_columns_that_say_nothing_of_similarity_are_ignored(tmp_path: Path, rated: str) -> None:
    name, value = rated.split(",")
    path = tmp_path / "rows.csv"
    path.write_text(f"question,answer,{name}\nwhy,so,{value}\nhow,thus,{value}\n")
    assert len(Embed(EmbedOptions(data=str(path))).read(lambda _: None).train) == 2


def test_lists_of_texts_are_groups(tmp_path: Path) -> None:
    rows = [
        {"query": "q", "pos": ["a", "b"], "neg": ["x", "y"], "negative_1": "z"},
        {"query": "r", "pos": ["a"], "neg": [], "negative_1": "z", "score": 1},
        {"query": "s", "pos": ["a"], "neg": ["y"], "negative_1": None},
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    task = Embed(EmbedOptions(data=str(data), query_prompt="ask: ", **SMALL))
    assert [group.texts for group in task.read(lambda _: None).train] == [
        ("q", "a", "x", "y", "z"),
        ("q", "b", "x", "y", "z"),
        ("r", "a", "z"),
        ("s", "a", "y"),
    ]
    groups: Any = load_run(task).samples
    texts = [groups.texts_of(n).tolist() for n in range(3)]
    assert texts[0][0] == texts[1][0] != texts[2][0], "equal texts have one number"
    assert (texts[0][1], texts[0][2:]) == (texts[2][1], texts[1][2:])
    assert texts[2][2] == texts[0][4]
    assert len(groups[0].parts[0].inputs["input_ids"]) > 3, "with the prompt"


def test_groups_of_large_files_stay_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "lists.jsonl", "lists")
    options = EmbedOptions(data=str(tmp_path / "lists.jsonl"), token_cache=str(tmp_path / "cache"))
    groups = [*Embed(options).read(lambda _: None).train]
    monkeypatch.setattr(readers, "MOST_IN_MEMORY", 1)
    found = Embed(options).read(lambda _: None).train
    assert isinstance(found, Lazy)
    assert [*found] == groups
    assert {len(each.texts) for each in groups} == {2, 3, 4, 5}


def test_a_text_is_no_negative_of_itself() -> None:
    """Of two questions that ask the same, each is the other's positive."""
    numbers, vectors = torch.tensor([[0, 1], [1, 0], [2, 3]]), torch.eye(6)
    scores, right = compare(vectors, numbers, Ranks())
    assert right.tolist() == [0, 1, 2]
    assert (scores < 0).tolist() == [[False, True, False], [True, False, False], [False] * 3]


def test_mined_negatives_are_similar_texts_that_are_not_right() -> None:
    from jobs.worker.data.groups import Grouped

    # Anchors 0 and 5; texts 1 to 4; the second anchor has two positives and a negative.
    numbers, bounds = np.array([0, 1, 5, 2, 3, 5, 4]), np.array([0, 2, 5, 7])
    angles = np.radians([0, 30, 20, 45, 80, 90])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    nothing: Any = None
    groups = Grouped(nothing, bounds, numbers, np.arange(6), np.arange(6))
    for size in (1, 2):
        for found in run_threaded(size, lambda ranks: mine(groups, vectors, 2, ranks)):
            # Text 2 is nearer to anchor 0 than its positive; of anchor 5, 2 and 4 are right.
            assert found.tolist() == [[3, 4], [-1, -1], [3, 1]]
    with_own = replace(groups, same=np.array([0, 5, 2, 3, 4, 5]))  # text 1 is that of anchor 5
    assert mine(with_own, vectors, 2, Ranks()).tolist() == [[3, 4], [-1, -1], [3, -1]]
    added = add_negatives(groups, np.array([[3, 4], [-1, -1], [3, -1]]))
    assert [added.texts_of(n).tolist() for n in range(3)] == [[0, 1, 3, 4], [5, 2, 3], [5, 4, 3]]


def test_a_model_finds_its_own_negatives(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", "pairs")
    data = str(tmp_path / "rows.jsonl")
    given = {**SMALL, "token_cache": str(tmp_path / "cache")}
    task = Embed(EmbedOptions(data=data, mine_negatives=3, **given))

    read = task.read(lambda _: None)
    (loaded,) = run_threaded(1, lambda ranks: task.load(session(task.options, ranks), read))

    def work(ranks: Ranks) -> Any:
        context = session(task.options, ranks)
        samples = task.prepare(context, loaded, read.train)
        return samples, task.finish(context, loaded, samples)

    (plain, one), (_, two) = run_threaded(1, work)[0], run_threaded(2, work)[1]
    assert np.array_equal(one.numbers, two.numbers)
    assert one.digest() == plain.digest(), "so that a run resumes although they are computed again"
    added = [len(one.texts_of(n)) - len(plain.texts_of(n)) for n in range(len(one))]
    assert max(added) == 3
    assert one.lengths.sum() > plain.lengths.sum()
    loaded.model.pooling = "cls"
    assert not np.array_equal(run_threaded(1, work)[0][1].numbers, one.numbers)


def test_of_t5_only_the_encoder_is_learned(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", "pairs")
    given = {**SMALL, "model": save_with_decoder(tmp_path / "base", "t5")}
    save_model(
        tmp_path, load_run(Embed(EmbedOptions(data=str(tmp_path / "rows.jsonl"), **given))).loaded
    )
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["T5EncoderModel"], "which sentence-transformers loads"
    (found,) = predict(tmp_path / "model", [{"text": "a tile"}])
    assert torch.tensor(found["embedding"]).norm() == pytest.approx(1, abs=1e-3)


def test_a_model_that_also_reads_images_has_vectors_of_its_texts_size(
    tmp_path: Path,
) -> None:
    from transformers import Gemma3Config, Gemma3Model

    tokenizer = KINDS["gpt2"](["a tile"])
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text = {**shape, "vocab_size": len(tokenizer), "head_dim": 8, "num_attention_heads": 2}
    vision = {**shape, "num_attention_heads": 2, "image_size": 28}
    Gemma3Model(Gemma3Config(text_config=text, vision_config=vision)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    write_rows(tmp_path / "rows.jsonl", "pairs")
    given = {**SMALL, "model": str(tmp_path), "matryoshka": "16"}
    with pytest.raises(ModelError, match="--matryoshka 16: the vectors have 16 dimensions"):
        load_run(Embed(EmbedOptions(data=str(tmp_path / "rows.jsonl"), **given)))


def test_more_dimensions_than_the_vectors_have(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", "pairs")
    task = Embed(EmbedOptions(data=str(tmp_path / "rows.jsonl"), matryoshka="128,64", **SMALL))
    with pytest.raises(ModelError, match="--matryoshka 128,64: the vectors have 128 dimensions"):
        load_run(task)
