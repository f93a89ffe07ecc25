"""Layers by depth, for the names that models of several families give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from jobs.worker.fast.layers import freeze_layers, number_layers
from jobs.worker.fast.optimizer import group_parameters
from jobs.worker.runtime.errors import ModelError
from tests.jobs.worker.fast.test_families import build


def new_model(family: str) -> Any:
    """A model of two layers, without weights."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForCausalLM if family == "llama" else AutoModelForSequenceClassification
    with torch.device("meta"):
        return build(kind, family)


@pytest.mark.parametrize(
    ("family", "tables", "layers", "head"),
    [
        ("bert", "bert.embeddings.", ["bert.encoder.layer."], {"bert.pooler.dense", "classifier"}),
        (
            "distilbert",
            "distilbert.embeddings.",
            ["distilbert.transformer.layer."],
            {"pre_classifier", "classifier"},
        ),
        (
            "roberta",
            "roberta.embeddings.",
            ["roberta.encoder.layer."],
            {"classifier.dense", "classifier.out_proj"},
        ),
        (
            "modernbert",
            "model.embeddings.",
            ["model.layers."],
            {"model.final_norm", "head.dense", "head.norm", "classifier"},
        ),
        ("llama", "model.embed_tokens.", ["model.layers."], {"model.norm", "lm_head"}),
        ("gpt2", "transformer.w", ["transformer.h."], {"transformer.ln_f", "score"}),
    ],
)
def test_layers_are_numbered_from_the_embeddings_to_the_head(
    family: str, tables: str, layers: list[str], head: set[str]
) -> None:
    model = new_model(family)
    depths, of_head = number_layers(model)
    assert of_head == 3
    found: list[set[str]] = [set() for _ in range(4)]
    for name, each in model.named_parameters():
        found[depths[each]].add(name)
    assert found[0]
    assert all(name.startswith(tables) for name in found[0])
    for number in range(2):
        begins = tuple(f"{each}{number}." for each in layers)
        assert found[1 + number]
        assert all(name.startswith(begins) for name in found[1 + number])
    assert {name.rpartition(".")[0] for name in found[3]} == head


def test_an_encoder_and_a_decoder_have_layers_of_the_same_numbers() -> None:
    model = new_model("bart")
    freeze_layers(model, "1")
    frozen = {n for n, each in model.named_parameters() if not each.requires_grad}
    for side in ("encoder", "decoder"):
        layers = {n.split(".")[3] for n in frozen if n.startswith(f"model.{side}.layers.")}
        assert layers == {"0"}
    assert {n for n in frozen if ".layers." not in n} == {
        "model.shared.weight",
        "model.encoder.embed_positions.weight",
        "model.decoder.embed_positions.weight",
    }


@pytest.mark.parametrize(("frozen", "least"), [(None, -1), ("embeddings", 0), ("1", 1)])
def test_frozen_weights_are_not_in_the_optimizer(frozen: str | None, least: int) -> None:
    model = new_model("bert")
    freeze_layers(model, frozen)
    trained = {each for each, depth in number_layers(model)[0].items() if depth > least}
    groups = group_parameters(model, 0.0)
    assert {each for group in groups for each in group["params"]} == trained
    assert {each for each in model.parameters() if each.requires_grad} == trained


def test_the_rate_falls_with_the_distance_from_the_head() -> None:
    model = new_model("bert")
    depths, of_head = number_layers(model)
    assert of_head == 3
    for decay in (0.0, 0.1):
        groups = group_parameters(model, decay, 0.5)
        found = [(each, group) for group in groups for each in group["params"]]
        assert len(found) == len(depths)
        for each, group in found:
            assert group["scale"] == 0.5 ** (3 - depths[each])
            assert group["weight_decay"] == (decay if each.dim() > 1 else 0.0)
    assert {group["scale"] for group in group_parameters(model, 0.1)} == {1.0}


@pytest.mark.parametrize(
    ("model", "frozen", "message"),
    [
        (nn.Linear(2, 2), "1", "--freeze-layers 1 is more than the model's layers: 0"),
        ("bert", "3", "--freeze-layers 3 is more than the model's layers: 2"),
        (nn.Sequential(nn.Embedding(2, 2)), "embeddings", "leaves nothing to train"),
    ],
)
def test_what_can_not_be_frozen_is_refused(model: Any, frozen: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        freeze_layers(new_model(model) if isinstance(model, str) else model, frozen)
