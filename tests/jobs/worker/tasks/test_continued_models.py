"""Models that classify and tag continue with: their classes, and decoders without a padding token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LongformerConfig,
    LongformerForQuestionAnswering,
    XLNetConfig,
    XLNetForSequenceClassification,
)

from jobs.worker.tasks.classify import Classify, ClassifyOptions
from jobs.worker.tasks.predict import load_trained, predict
from jobs.worker.tasks.tag import Tag, TagOptions
from jobs.worker.training.model import save_model
from jobs.worker.training.options import NO_CACHE
from jobs.worker.training.task import Loaded
from jobs.worker.training.text_task import Row
from tests.jobs.worker.tasks.test_classify_and_tag import prepare, write
from tests.jobs.worker.tokenizer_families import KINDS

BERT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SHARED: dict[str, Any] = {"token_cache": NO_CACHE, "max_length": 32}
MNLI = ["entailment", "neutral", "contradiction"]


def save_classifier(folder: Path, tokenizer: Any, task: str, names: Sequence[str]) -> torch.Tensor:
    """Save a small model with a head for these classes, if any; return the head's weights."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=len(tokenizer), id2label=dict(enumerate(names)), **BERT
    )
    head = {"classify": "Sequence", "tag": "Token"}[task]
    kind = f"BertFor{head}Classification" if names else "BertModel"
    model = getattr(transformers, kind)(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights: torch.Tensor = model.classifier.weight.detach() if names else torch.zeros(0)
    return weights


def load(task: str, folder: Path, names: Sequence[Any]) -> tuple[Any, Loaded, Any]:
    """Return the task for data with these classes, its model, and the samples."""
    common: dict[str, Any] = {"model": str(folder / "model"), **SHARED}
    if task == "classify":
        data = write(folder, [{"text": "tile registers", "label": each} for each in names])
        chosen: Any = Classify(ClassifyOptions(data=data, **common))
    else:
        data = write(folder, [{"words": ["tile"], "tags": [str(each)]} for each in names])
        chosen = Tag(TagOptions(data=data, **common))
    loaded, samples = prepare(chosen)
    return chosen, loaded, samples


NEW: list[str] = []
"""The order of the classes of a new head."""


@pytest.mark.parametrize("task", ["classify", "tag"])
@pytest.mark.parametrize(
    ("own", "names", "order"),
    [
        ([each.upper() for each in MNLI], MNLI, MNLI),
        (["LABEL_0", "LABEL_1", "LABEL_2"], [2, 0, 1], ["0", "1", "2"]),
        (["2", "0", "1"], [0, 1, 2], ["2", "0", "1"]),
        (["a", "B", "A"], ["A", "B", "a"], ["a", "B", "A"]),
        *((MNLI, names, NEW) for names in (["x", "y", "z"], MNLI[:2], [*MNLI, "x"])),
        (MNLI, ["A", "a", "neutral"], NEW),
        ([], ["x", "y"], NEW),
    ],
)
def test_a_head_for_the_same_classes_keeps_their_order_and_another_one_is_new(
    tmp_path: Path, tokenizer: Any, task: str, own: list[str], names: list[Any], order: list[str]
) -> None:
    weights = save_classifier(tmp_path / "model", tokenizer, task, own)
    chosen, loaded, samples = load(task, tmp_path, names)
    assert chosen.classes == (order or sorted(names))
    numbers = {name: number for number, name in enumerate(chosen.classes)}
    assert loaded.model.config.label2id == numbers
    labels = chosen.collate([samples[n] for n in range(len(names))], loaded)["labels"]
    assert labels[labels >= 0].tolist() == [numbers[str(name)] for name in names]
    found = loaded.model.classifier.weight
    if order:
        assert torch.equal(found, weights)
        assert (loaded.new_weights, loaded.other_classes) == ((), ())
        return
    assert len(found) == len(names)
    assert not {*found.flatten().tolist()} & {*weights.flatten().tolist()}
    assert 0.005 < float(found.detach().std()) < 0.05
    assert loaded.new_weights == ("classifier.bias", "classifier.weight")
    assert loaded.other_classes == tuple(own)


DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "llama": {**BERT, "num_key_value_heads": 2},
}
PADDINGS = [(None, None, False), (None, None, True), ("<s>", None, False), (None, 5, False)]
PADDINGS += [(None, -1, False), ("</s>", 0, False)]
ROWS = ["tile", "eight cores of a tile!", "which registers", "!!", "cores and tile registers"]


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize(("in_tokenizer", "in_config", "suffix"), PADDINGS)
def test_a_decoder_classifies_by_the_last_token_of_a_text(
    tmp_path: Path, kind: str, in_tokenizer: str | None, in_config: int | None, suffix: bool
) -> None:
    """``in_tokenizer`` and ``in_config`` are the padding tokens, ``suffix`` a token after every text."""
    import transformers
    from tokenizers.processors import TemplateProcessing

    tokenizer = KINDS["gpt2"](ROWS)
    tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token = in_tokenizer, "</s>", "<s>"
    if suffix:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=len(tokenizer) + 8, eos_token_id=1, bos_token_id=0, **DECODERS[kind]
    )
    config.pad_token_id = None
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    padding = "null" if in_config is None else str(in_config)
    path.write_text(path.read_text().replace('"pad_token_id": null', f'"pad_token_id": {padding}'))
    rows = [{"text": text, "label": "xy"[n % 2]} for n, text in enumerate(ROWS)]
    model, data = str(tmp_path / "base"), write(tmp_path, rows)
    chosen = Classify(ClassifyOptions(data=data, model=model, **SHARED))
    loaded, samples = prepare(chosen)
    batch = chosen.collate([samples[n] for n in range(len(ROWS))], loaded)
    model = loaded.model.eval()
    with torch.no_grad():
        found = model(**batch).logits
        for row, each in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            alone = row[: int(each.sum())][None]
            states = model.base_model(alone).last_hidden_state
            assert torch.allclose(model.score(states)[0, -1], found[0], atol=1e-5)
            found = found[1:]
    save_model(tmp_path, loaded)
    _, again = load_trained(str(tmp_path / "model"))
    assert again.tokenizer.pad_token_id == again.model.config.pad_token_id == loaded.pad_token
    again.tokenizer.padding_side = "left"  # as many decoders have it
    asked = [Row("row", row) for row in rows]
    alone = [Classify.predict(again, [row])[0]["labels"].keys() for row in asked]
    assert [each["labels"].keys() for each in Classify.predict(again, asked)] == alone


def save_with_decoder(folder: Path, kind: str) -> str:
    """Save a small model that has an encoder and a decoder; return its folder."""
    import transformers

    tokenizer = KINDS["roberta"](ROWS)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    if kind == "bart":
        names = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
        sides = ("encoder", "decoder")
        shape = {f"{side}_{name}": size for side in sides for name, size in names.items()}
        shape["d_model"] = 16
    marks = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, vocab_size=len(tokenizer), **marks, **shape)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_the_end_of_a_text_is_not_a_mark_that_the_text_has(tmp_path: Path, kind: str) -> None:
    """Models with a decoder find each text's end, and fail if texts have different numbers of marks."""
    html = ["a <s>tile</s>", "cores"]
    data = write(tmp_path, [{"text": each, "label": each[0]} for each in html])
    model = save_with_decoder(tmp_path / "base", kind)
    chosen = Classify(ClassifyOptions(data=data, model=model, **SHARED))
    loaded, samples = prepare(chosen)
    assert chosen.loss(loaded.model, chosen.collate([samples[0], samples[1]], loaded)).isfinite()
    save_model(tmp_path, loaded)
    _, again = load_trained(str(tmp_path / "model"))
    rows = [Row("row", {"text": each}) for each in html]
    alone = [Classify.predict(again, [row])[0]["labels"] for row in rows]
    found = Classify.predict(again, rows)
    for one, other in zip(alone, found, strict=True):
        assert one == pytest.approx(other["labels"], abs=1e-3)
    assert alone[0] != alone[1]
    # Without this project, the saved tokenizer does the same.
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert theirs(html[0])["input_ids"] == samples[0].inputs["input_ids"].tolist()
    # The user's own marks stay marks.
    theirs = AutoTokenizer.from_pretrained(model)
    theirs.add_special_tokens({"additional_special_tokens": ["[E1]"]})
    theirs.save_pretrained(model)
    whole = AutoModelForSequenceClassification.from_pretrained(model)
    whole.resize_token_embeddings(len(theirs), mean_resizing=False)
    whole.save_pretrained(model)
    marked = prepare(chosen)[0].tokenizer
    assert len(theirs) - 1 in marked("a [E1] tile")["input_ids"]


def test_a_pair_is_read_without_kinds_of_texts_if_the_model_has_one(tmp_path: Path) -> None:
    tokenizer = KINDS["bert"](["tile registers"])
    config = BertConfig(vocab_size=len(tokenizer), type_vocab_size=1, **BERT)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (found,) = predict(tmp_path, [{"text": "tile", "pair": "registers"}])
    assert found["labels"]


def test_xlnet_classifies_a_text_alike_alone_and_beside_a_longer_one(tmp_path: Path) -> None:
    tokenizer = KINDS["xlnet"](ROWS)
    shape = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "initializer_range": 1.0}
    config = XLNetConfig(vocab_size=len(tokenizer), **shape)
    XLNetForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rows = [{"text": each} for each in ROWS]
    for one, row in zip(predict(tmp_path, rows), rows, strict=True):
        assert one["labels"] == pytest.approx(predict(tmp_path, [row])[0]["labels"], abs=1e-2)


def test_longformer_finds_the_end_of_a_question_though_the_passage_has_such_marks(
    tmp_path: Path,
) -> None:
    tokenizer = KINDS["roberta"](ROWS)
    shape = {**BERT, "attention_window": [8], "max_position_embeddings": 66, "sep_token_id": 1}
    config = LongformerConfig(vocab_size=len(tokenizer), pad_token_id=0, **shape)
    LongformerForQuestionAnswering(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rows = [{"question": "which", "context": each} for each in ("a tile", "cores</s> tile")]
    assert predict(tmp_path, rows) == [predict(tmp_path, [row])[0] for row in rows]
