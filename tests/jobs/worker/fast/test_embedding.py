"""Training only the words of the data, compared with training the whole table."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForQuestionAnswering

from jobs.worker.fast.embedding import (
    UsedEmbedding,
    restore_words,
    train_used_words,
    word_table,
)
from tests.jobs.worker.fast.test_communication import small_model

IDS = torch.tensor([[2, 7, 7, 9], [2, 30, 9, 0]])


def new_model() -> Any:
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForQuestionAnswering(config)


def learn(model: Any) -> list[float]:
    """Take three steps; return their losses."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(IDS, start_positions=torch.tensor([1, 2]), end_positions=IDS[:, 3] % 4).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_trained_model_is_that_of_the_whole_table() -> None:
    whole, part = new_model(), new_model()
    assert word_table(part) is part.bert.embeddings.word_embeddings
    before = copy.deepcopy(whole.state_dict())

    train_used_words(part, [2, 7, 9, 30])

    assert word_table(part).weight.shape == (5, 16), "and the padding"  # type: ignore[union-attr]
    assert learn(part) == learn(whole)
    restore_words(part)
    expected = whole.state_dict()
    assert part.state_dict().keys() == expected.keys()
    for name, value in part.state_dict().items():
        assert torch.equal(value, expected[name]), name
    words = "bert.embeddings.word_embeddings.weight"
    changed = (part.state_dict()[words] != before[words]).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [2, 7, 9, 30], "padding has no gradient"


def test_evaluation_in_between_knows_all_words() -> None:
    model = new_model()
    train_used_words(model, [2, 7, 9, 30])
    learn(model)
    model.eval()
    with torch.no_grad():
        between = model(torch.tensor([[2, 7, 11]])).start_logits
        restore_words(model)
        assert torch.equal(model(torch.tensor([[2, 7, 11]])).start_logits, between)


def test_an_unknown_word_in_training_is_an_error() -> None:
    model = new_model()
    train_used_words(model, [2, 7, 9])
    with pytest.raises(IndexError):
        learn(model)


@pytest.mark.parametrize(
    "reason", ["all used", "shared", "not trained", "max_norm", "sparse", "scaled", "no words"]
)
def test_other_tables_stay_as_they_are(reason: str) -> None:
    model = small_model()
    if reason == "shared":
        model.layer = nn.Linear(8, 10)
        model.layer.weight = model.words.weight
    if reason == "no words":  # as transformers' Wav2Vec2
        vars(model)["get_input_embeddings"] = Mock(side_effect=NotImplementedError)
    model.words.weight.requires_grad_(reason != "not trained")
    model.words.max_norm = 1.0 if reason == "max_norm" else None
    model.words.sparse = reason == "sparse"
    model.words.scale_grad_by_freq = reason == "scaled"

    train_used_words(model, range(10) if reason == "all used" else [1, 2])

    assert not isinstance(model.words, UsedEmbedding)
