from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from jobs.worker.runtime.errors import ModelError, TrainingError, WorkerError
from jobs.worker.runtime.output import state_folder
from jobs.worker.runtime.ranks import Ranks
from jobs.worker.tasks.squad.dataset import Question, all_texts
from jobs.worker.tasks.squad.task import DEMO, HEAD
from jobs.worker.training.model import (
    load_model,
    load_pretrained,
    longest_input,
    save_model,
    train_tokenizer,
)
from jobs.worker.training.optimizer_step import load_ipex


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", ["no-organization/no-model", "not a model name", "", "~/none"])
def test_an_unknown_model_or_a_folder_without_one_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    name, why = name or str(tmp_path), ": no such folder" if "~" in name else " can't be loaded: "
    with pytest.raises(ModelError, match=f"model {name}{why}") as raised:
        load_model(replace(DEMO, model=name), HEAD, [], Ranks())
    assert "\n" not in raised.value.message


def test_the_tokenizer_depends_only_on_the_texts(questions: list[Question]) -> None:
    first, second = (train_tokenizer(all_texts(questions)) for _ in range(2))
    assert first == second


def test_the_tokenizer_loses_nothing(questions: list[Question], tokenizer: Any) -> None:
    for text in all_texts(questions):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert "".join(tokenizer.decode(ids).split()) == "".join(text.lower().split())


def save_tiny(folder: Path, tokenizer: Any, kind: str = "bert", **wishes: Any) -> Path:
    """A small random model in a folder, with the tests' tokenizer."""
    from transformers import AutoConfig, AutoModelForQuestionAnswering

    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 130,
    }
    config = AutoConfig.for_model(kind, **{**shape, **wishes})
    AutoModelForQuestionAnswering.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "positions", "longest"),
    [("bert", 101, 100), ("bert", 128, 128), ("roberta", 130, 128)],
)
def test_a_window_fits_the_models_positions_padded_to_whole_batches(
    tmp_path: Path, tokenizer: Any, kind: str, positions: int, longest: int
) -> None:
    folder = save_tiny(tmp_path, tokenizer, kind, max_position_embeddings=positions, pad_token_id=1)
    options = replace(DEMO, model=str(folder), max_length=longest, stride=8)
    loaded = load_model(options, HEAD, [], Ranks())
    assert longest_input(loaded) == longest
    ids = torch.full((1, longest), 5)
    loaded.model(input_ids=ids)
    with pytest.raises(ModelError) as raised:
        load_model(replace(options, max_length=longest + 1), HEAD, [], Ranks())
    assert raised.value.hint == f"use --max-length {longest} or less"


def test_a_model_stored_in_half_precision_is_trained_in_fp32(
    tmp_path: Path, tokenizer: Any
) -> None:
    from transformers import AutoModelForQuestionAnswering

    folder = save_tiny(tmp_path, tokenizer)
    half = AutoModelForQuestionAnswering.from_pretrained(folder).to(torch.float16)
    half.save_pretrained(folder)
    loaded = load_pretrained(str(folder), HEAD)
    assert {each.dtype for each in loaded.model.parameters()} == {torch.float32}


def test_a_model_is_saved_with_its_own_dropout(tmp_path: Path, tokenizer: Any) -> None:
    folder = save_tiny(tmp_path / "before", tokenizer)
    loaded = load_pretrained(str(folder), HEAD, keep_dropout=False)
    attention = loaded.model.bert.encoder.layer[0].attention
    assert (attention.self.dropout.p, attention.output.dropout.p) == (0.0, 0.1)
    save_model(tmp_path, loaded)
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    assert saved["attention_probs_dropout_prob"] == 0.1


def test_a_full_disk_is_explained_when_the_model_is_saved(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_pretrained(str(save_tiny(tmp_path / "before", tokenizer)), HEAD)

    def refuse(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(type(loaded.model), "save_pretrained", refuse)
    hints = []
    for checkpoint in (None, "step-000007"):
        if checkpoint:
            (state_folder(tmp_path) / "checkpoints" / checkpoint).mkdir(parents=True)
        with pytest.raises(
            TrainingError, match=r"model can't be written: Error while .* No space left"
        ) as failed:
            save_model(tmp_path, loaded)
        hints.append(failed.value.hint)
    assert hints == [
        "free disk space, then use --resume: there is no checkpoint, so training starts over",
        "free disk space, then use --resume: it continues from step-000007",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before"]


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    folder = save_tiny(tmp_path, tokenizer, vocab_size=len(tokenizer) - 3)
    with pytest.raises(ModelError, match=rf"has {len(tokenizer) - 3} tokens, its tokenizer"):
        load_pretrained(str(folder), HEAD)


def test_inputs_that_the_model_does_not_take_are_omitted(tmp_path: Path, tokenizer: Any) -> None:
    named = copy.deepcopy(tokenizer)
    named.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    wishes = {"dim": 16, "n_heads": 2, "n_layers": 1, "hidden_dim": 16}
    folder = save_tiny(tmp_path, named, "distilbert", **wishes)
    loaded = load_pretrained(str(folder), HEAD)
    assert loaded.tokenizer.model_input_names == ["input_ids", "attention_mask"]


def test_a_missing_ipex_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "intel_extension_for_pytorch", None)
    with pytest.raises(WorkerError, match="--ipex needs intel_extension_for_pytorch"):
        load_ipex()
