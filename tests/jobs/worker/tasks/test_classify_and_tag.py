"""What is these tasks' own: labels, scores, and the weight of samples with different numbers of labels."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.worker.data.tokens import Column, TextSamples, encode, read_template
from jobs.worker.runtime.errors import DatasetError
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.tasks.classify import Classify, ClassifyOptions
from jobs.worker.tasks.tag import UNLABELED, Tag, TagOptions, find_entities, score
from jobs.worker.training.batches import TrainingRun
from jobs.worker.training.evaluation import round_up
from jobs.worker.training.model import reading_limit
from jobs.worker.training.optimizer_step import StepTimer, compute_gradients
from jobs.worker.training.options import NO_CACHE, SCRATCH
from jobs.worker.training.text_task import Row
from tests.jobs.worker.threaded_ranks import load_run, run_threaded, session
from tests.jobs.worker.tokenizer_families import KINDS


def prepare(task: Any) -> tuple[Any, Any]:
    """Return a task's new model, and the samples of its training data."""
    run = load_run(task)
    return run.loaded, run.samples


def write(folder: Path, rows: Sequence[dict[str, Any]], name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def classify(folder: Path, rows: Sequence[dict[str, Any]], **more: Any) -> Classify:
    data = write(folder, rows)
    return Classify(ClassifyOptions(model=SCRATCH, data=data, token_cache=NO_CACHE, **more))


def test_classes_are_the_labels_of_the_training_data_also_in_other_formats(tmp_path: Path) -> None:
    for labels, classes in ((["b", "a", "b"], ["a", "b"]), ([9.0, 10, 9], ["9", "10"])):
        task = classify(tmp_path, [{"text": "t", "label": label} for label in labels])
        (tmp_path / "b.csv").write_text(f"text,label\nc,{classes[1]}\n")
        task.options = replace(task.options, eval=str(tmp_path / "b.csv"))
        assert [each.labels for each in task.read(print).eval] == [(classes[1],)]
        assert task.classes == classes


@pytest.mark.parametrize(
    ("sizes", "share", "held"),
    [
        ({"a": 90, "b": 8, "c": 2}, 0.1, {"a": 8, "b": 1, "c": 1}),
        ({"a": 1000, "b": 500, "c": 50, "d": 5}, 0.1, {"a": 100, "b": 50, "c": 5, "d": 1}),
        ({"a": 99, "b": 96, "c": 94, "d": 11}, 0.1, {"a": 10, "b": 10, "c": 9, "d": 1}),
        ({"a": 80, **dict.fromkeys("bcdefghijk", 2)}, 0.1, {"a": 6, **dict.fromkeys("bcde", 1)}),
        ({"bad": 60, "good": 30, **dict.fromkeys("abcdefghijkl", 1)}, 0.2, {"bad": 12, "good": 6}),
    ],
)
def test_rare_classes_are_held_out_and_large_ones_have_their_share(
    tmp_path: Path, sizes: dict[str, int], share: float, held: dict[str, int]
) -> None:
    """Labels that occur once are not held out."""
    labels = [name for name, count in sizes.items() for _ in range(count)]
    rows = [{"text": f"t{n}", "label": label} for n, label in enumerate(labels)]
    notes = list[str]()
    parts = [
        classify(tmp_path, rows, eval_fraction=share, seed=seed).read(notes.append)
        for seed in (1, 1, 2)
    ]
    for part in parts:
        assert Counter(label for record in part.eval for label in record.labels) == held
        assert len({*part.train} | {*part.eval}) == len(rows) == len(part.train) + len(part.eval)
    assert parts[0].eval_source.startswith(f"{share} of ")
    evals = [[*each.eval] for each in parts]
    assert evals[0] == evals[1] != evals[2]
    if "bad" in sizes:
        assert "14 classes: 'bad' 48, 'good' 24, 'a' 1," in notes[-1]
        assert notes[-1].endswith(" 1, …")
        assert "--eval-fraction holds out no rows of 12 labels: 'a', 'b'," in notes[-2]


@pytest.mark.parametrize("seed", range(5))
def test_each_part_has_each_tag_that_occurs_twice(tmp_path: Path, seed: int) -> None:
    tags = [["O", "B"]] * 10 + [["O", "rare"], ["O", "B", "other"]]
    sentences = [{"words": ["a", "b", "c"][: len(each)], "tags": each} for each in tags]
    options = TagOptions(data=write(tmp_path, sentences), eval_fraction=0.5, seed=seed)
    data = Tag(options).read(lambda _: None)
    assert [record.labels for record in data.eval] == [["O", "B"]] * len(data.eval)
    assert len(data.eval) in (5, 6)
    rows = [{"text": "t", "label": each} for each in "abcd"]
    with pytest.raises(DatasetError, match="needs labels that occur at least twice"):
        classify(tmp_path, rows, eval_fraction=0.5).read(lambda _: None)


def test_several_labels_and_pairs(tmp_path: Path) -> None:
    rows = [
        {"text": "one fish", "other": "two", "label": ["a", "c"]},
        {"text": "red", "other": "blue fish", "label": []},
        {"text": "red", "other": "blue", "label": ["b"]},
    ]
    with pytest.raises(DatasetError, match=r"data.jsonl: has no column 'othr'; it has text, other"):
        classify(tmp_path, rows, pair_column="othr").check()
    task = classify(tmp_path, rows, pair_column=" other ")
    assert task.read(lambda _: None).columns == {"text": "text", "pair": "other"}
    loaded, samples = prepare(task)
    batch = task.collate([samples[n] for n in range(3)], loaded)
    assert batch["labels"].tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    separators = (batch["input_ids"] == loaded.tokenizer.sep_token_id).sum(dim=1)
    assert separators.tolist() == [2, 2, 2]
    assert loaded.model.config.problem_type == "multi_label_classification"
    loss = task.loss(loaded.model, batch)
    assert loss.item() == pytest.approx(0.69, abs=0.1)  # of a new model: as if tossing coins
    scores = task._score(samples, np.array([[1, 0, 1], [0, 0, 1], [0, 1, 0]], dtype=bool))
    assert scores["exact_match"] == pytest.approx(66.667)
    found = np.array([[1, 0, 0], [0, 0, 0]], dtype=bool)  # neither class 2 nor 3 occurs
    assert task._score(replace(samples, targets=[[0], []]), found)["macro_f1"] == 100.0
    assert task._score(replace(samples, targets=[[0], [0]]), found)["macro_f1"] == 66.667
    assert task._score(replace(samples, targets=[[], []]), found & False)["macro_f1"] == 0.0
    single = [{**each, "label": n} for n, each in enumerate(rows)]
    for data, metric, why in (
        (rows, "accuracy", "several labels per text"),
        (single, "exact_match", "one label per text"),
    ):
        with pytest.raises(DatasetError, match=f"--metric {metric}: .*data.jsonl has {why}"):
            classify(tmp_path, data, metric=metric).check()


def test_labels_in_one_cell(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,x; y\nb,[1];['2']\n")
    task = Classify(ClassifyOptions(model=SCRATCH, data=str(path), label_separator=";"))
    found = [each.labels for each in task.read(lambda _: None).train]
    assert found == [("x", "y"), ("[1]", "['2']")]
    path.write_text("text,label\na,x; y\nb,\"['x', 'y']\"\n")
    with pytest.raises(DatasetError, match="is a list, written as a text"):
        task.check()
    almost = "[1, " + "'x', " * 50 + "y"  # to see that takes no time
    path.write_text(f'text,label\na,x; y\nb,"{almost}"\n')
    task.check()


@pytest.mark.parametrize("pair", [False, True])
def test_long_texts_are_cut_as_the_tokenizer_would(tokenizer: Any, pair: bool) -> None:
    texts = ["tile registers " * n for n in (1, 9, 20, 25, 30)]
    sides = [texts, texts[::-1]][: 1 + pair]
    columns = encode([Column(each) for each in sides], tokenizer)
    samples = TextSamples(columns, read_template(tokenizer, pair=pair), [0] * 5, 24)
    for number in range(5):
        wanted = tokenizer(
            *(each[number] for each in sides), truncation="longest_first", max_length=24
        )
        found = samples[number].inputs
        assert found["input_ids"].tolist() == wanted["input_ids"]
        assert len(wanted["input_ids"]) == samples.lengths[number]


def tag(**more: Any) -> Tag:
    chosen = {"model": SCRATCH, "data": Tag.demo.data, "token_cache": NO_CACHE, "batch_size": 6}
    return Tag(TagOptions(**{**chosen, **more}))


def test_the_first_token_of_each_word_has_its_tag() -> None:
    task = tag()
    _, samples = prepare(task)
    records = task.read(lambda _: None).train
    for record, number in zip(records, range(len(samples)), strict=True):
        sample = samples[number]
        labeled = [task.classes[each] for each in sample.target if each != UNLABELED]
        assert labeled == record.labels
    assert task.weights(samples).tolist() == [len(record.labels) for record in records]


def gradients(
    options: TagOptions, loaded: Any, samples: Any, size: int, weights: list[float] | None = None
) -> dict[str, Any]:
    """Return the sum of the ranks' gradients of one step, as Replica makes it."""
    found: dict[str, Any] = {}
    task = Tag(options)
    task._weights = weights
    runs = run_threaded(
        size, lambda ranks: TrainingRun(session(options, ranks), task, loaded, samples)
    )
    for run in runs:
        loaded.model.zero_grad()
        compute_gradients(run, loaded.model, run.batch(np.arange(13)), StepTimer())
        for name, each in loaded.model.named_parameters():
            found[name] = found.get(name, 0.0) + each.grad
    return found


@pytest.mark.parametrize(("ranks", "parts"), [(2, 1), (1, 3), (5, 2)])
def test_ranks_with_different_numbers_of_labels_have_the_gradients_of_one(
    ranks: int, parts: int
) -> None:
    torch.manual_seed(5)
    options = tag(batch_size=13).options
    loaded, samples = prepare(tag())
    several = tag(batch_size=13, accumulate=parts).options
    for weights in (None, [1.0 + n for n in range(loaded.model.config.num_labels)]):
        expected = gradients(options, loaded, samples, 1, weights)
        found = gradients(several, loaded, samples, ranks, weights)
        for name, values in expected.items():
            assert torch.allclose(found[name], values, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("marks", ["BI", "I", "EI", "BIES", "S", "BE"])
@pytest.mark.parametrize("kinds", [("-A", "-B-2"), ("",)])
def test_entities_and_scores_are_those_of_seqeval(marks: str, kinds: tuple[str, ...]) -> None:
    """For any tags of IOB1, IOB2, IOE, and IOBES, also those that no scheme allows."""
    import seqeval.metrics as seqeval
    from seqeval.metrics.sequence_labeling import get_entities

    draw = np.random.default_rng(3)
    tags = ["O", *(f"{mark}{kind}" for mark in marks for kind in kinds)]
    truth, found = (
        [[tags[n] for n in draw.integers(0, len(tags), size)] for size in range(1, 60)]
        for _ in range(2)
    )
    for row in truth:
        spans = [(kind, begin, end - 1) for kind, begin, end in find_entities(row, bare=True)]
        # seqeval takes the type after a last dash for all of it.
        assert spans == [(kind, *place) for kind, *place in get_entities(row)]
    scores = score(truth, found, tags)
    assert scores["f1"] == pytest.approx(100 * seqeval.f1_score(truth, found), abs=1e-3)
    assert scores["recall"] == pytest.approx(100 * seqeval.recall_score(truth, found), abs=1e-3)
    assert scores["accuracy"] == pytest.approx(100 * seqeval.accuracy_score(truth, found), abs=1e-3)


@pytest.mark.parametrize(
    ("tags", "have"), [(["S", "O", "NN"], False), ("SML", False), ("BMES", True), ("IOE", True)]
)
def test_whether_tags_are_of_entities_depends_on_all_that_the_model_has(
    tmp_path: Path, tags: Sequence[str], have: bool
) -> None:
    assert ("f1" in score([[tags[0]]], [[tags[1]]], tags)) is have
    task = tag(data=write(tmp_path, [{"words": [*tags], "tags": [*tags]}]), metric="f1")
    with nullcontext() if have else pytest.raises(DatasetError, match="no tags of entities"):
        task.check()


@pytest.mark.parametrize("letters", ["BILU", "BMES", "BMEW"])
def test_letters_of_other_schemes_mean_those_of_iobes(letters: str) -> None:
    for row in itertools.product([*"BIES", ""], repeat=4):
        tags = [f"{mark}-A" if mark else "O" for mark in row]
        others = [each.translate(str.maketrans("BIES", letters)) for each in tags]
        assert find_entities(others) == find_entities(tags)


INVISIBLE = ["\u200b", "\ufeff", "\u00ad", "\u200b\u200d"]
SENTENCES = [["Ada"], ["ada", "wrote"], ["(Oslo", "Ada", "in", "Oslo"], ["in"]]


@pytest.mark.usefixtures("fp32")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [True, False])
def test_a_word_without_a_token_is_outside_and_moves_no_other(
    tmp_path: Path, kind: str, before: bool
) -> None:
    """Whether a tokenizer drops a word depends on its normalizer; here, each drops all invisible ones."""
    from tokenizers import Regex, normalizers

    words = [[*INVISIBLE, *each] if before else [*each, *INVISIBLE, "x"] for each in SENTENCES]
    rows = [{"words": each, "tags": [each[-1][-1]] * len(each)} for each in [*words, INVISIBLE]]
    task = Tag(TagOptions(model=SCRATCH, data=write(tmp_path, rows), token_cache=NO_CACHE))
    loaded, _ = prepare(task)
    tokenizer = KINDS[kind]([" ".join(each) for each in words])
    own = tokenizer.backend_tokenizer.normalizer
    drop = normalizers.Replace(Regex("[\u200b\u200d\ufeff\u00ad]"), "")
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([drop, *([own] if own else [])])
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    loaded = loaded._replace(tokenizer=tokenizer)
    loaded.model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    make_lively(loaded.model)
    records = task.read(lambda _: None).train

    def work(ranks: Ranks) -> Any:
        context = session(task.options, ranks)
        samples = task.prepare(context, loaded, records)
        return samples, task.evaluate(context, loaded, records, samples)["predictions"]

    ((samples, evaluated),) = run_threaded(1, work)
    for number, record in enumerate(records):
        perfect = np.pad(samples.targets[number], (samples[number].front, 0))
        found = task._words(record, samples, number, perfect)
        for word, marked, wanted in zip(record.words, found, record.labels, strict=True):
            assert marked == wanted or (word in INVISIBLE and marked == "O")
        if kind == "bert":  # others have tokens of the spaces between them
            assert {m for w, m in zip(record.words, found, strict=True) if w in INVISIBLE} == {"O"}
    for name, kind_of in (("words", list), ("text", " ".join)):
        asked: Any = [Row("row", {name: kind_of(each.words)}) for each in records]
        assert [each["tags"] for each in Tag.predict(loaded, asked)] == evaluated
    assert len({tag for row in evaluated for tag in row}) > 1


def test_a_sentence_without_tokens_has_a_loss_of_0() -> None:
    task = tag()
    loaded, samples = prepare(task)
    batch = task.collate([samples[0], samples[1]], loaded)
    expected = loaded.model(**batch).loss.item()
    assert task.loss(loaded.model, batch).item() == pytest.approx(expected, rel=1e-6)
    batch["labels"].fill_(UNLABELED)
    loss = task.loss(loaded.model, batch)
    torch.autograd.backward(loss)
    assert loss.item() == 0.0
    assert all(each.grad.isfinite().all() for each in loaded.model.parameters())


def make_lively(model: torch.nn.Module) -> None:
    """Give a new model weights with which its predictions differ from text to text."""
    torch.manual_seed(2)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.5)


@pytest.fixture
def fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without bf16, which would round to other labels."""
    monkeypatch.setattr("jobs.worker.runtime.precision.read_cpu_flags", frozenset)


@pytest.mark.usefixtures("fp32")
@pytest.mark.parametrize("several", [False, True])
def test_predicted_labels_are_those_of_evaluation(tmp_path: Path, several: bool) -> None:
    texts = [(" ".join(("abcdefgh" * 3)[: n % 24 + 1]), "bcd"[n % 3]) for n in range(40)]
    rows = [
        {"text": text, "pair": pair, "label": ["x", "yz"[n % 2]] if several else "xyz"[n % 3]}
        for n, (text, pair) in enumerate(texts)
    ]
    task = classify(tmp_path, rows, pair_column="pair", max_length=16)
    loaded, samples = prepare(task)
    make_lively(loaded.model)
    batch = task.collate([samples[n] for n in range(len(rows))], loaded)
    batch.pop("labels")
    with torch.inference_mode():
        logits = loaded.model.eval()(**batch).logits
    if several:
        loaded.tokenizer.model_input_names = ["input_ids"]  # such as FNet's, without a mask
    found = Classify.predict(loaded, [Row("row", row) for row in rows])
    chosen = logits > 0 if several else logits == logits.amax(dim=1, keepdim=True)
    expected = [[task.classes[n] for n in row.nonzero()[:, 0].tolist()] for row in chosen]
    assert [[*each["labels"]] for each in found] == expected
    assert len({str(each) for each in expected}) > 1
    mixed = [Row("row", row) for row in (rows[0], {"text": "h g f"}, rows[1], {"text": "c"})]
    alone = [Classify.predict(loaded, [each])[0] for each in mixed]
    assert Classify.predict(loaded, mixed) == alone, "some are no pairs"
    with pytest.raises(DatasetError, match=r"line 7: 'text' is not a text"):
        Classify.predict(loaded, [Row("line 7", {"texts": "x"})])


def test_texts_of_all_lengths_have_few_shapes(tmp_path: Path) -> None:
    widths = {each: round_up(each) for each in range(1, 513)}
    assert all(each <= width <= each * 1.125 for each, width in widths.items())
    assert len({*widths.values()}) < 60
    task, shapes = classify(tmp_path, [{"text": "b c d", "label": each} for each in "xyz"]), []
    loaded, _ = prepare(task)
    most = reading_limit(loaded)
    assert most == task.options.max_length

    def note(_: Any, __: Any, inputs: dict[str, torch.Tensor]) -> None:
        shapes.append([*inputs["input_ids"].shape])

    loaded.model.register_forward_pre_hook(note, with_kwargs=True)
    texts = [*["b c d"] * 16, "d c " * most, *["b c d"] * 15]
    Classify.predict(loaded, [Row("row", {"text": text}) for text in texts])
    assert shapes == [[4, most], [28, 5]], "all short texts were padded to the long one"
