"""The last layer for the first token alone: which families allow it, with equal gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from jobs.worker.fast.first_token import (
    FirstTokenNorm,
    compute_all_tokens,
    skip_other_tokens,
)

from .test_families import ENCODERS, SIZES

FAMILIES = [*ENCODERS, "gpt2"]
SKIP = {
    *("bert", "distilbert", "roberta", "electra", "xlm-roberta", "camembert", "mpnet", "fnet"),
    *("deberta-v2", "ernie", "convbert", "roformer", "nystromformer"),
}
IDS = torch.randint(5, 30, (2, 16), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[1, 10:] = 0


def build(auto: Any, family: str) -> Any:
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model(family, **SIZES, num_labels=3)).train()


def gradients(model: Any, labels: torch.Tensor) -> list[torch.Tensor]:
    model.eval().zero_grad()
    model(input_ids=IDS, attention_mask=MASK, labels=labels).loss.backward()
    model.train()
    return [torch.zeros(1) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model, labels = build(AutoModelForSequenceClassification, family), torch.tensor([0, 2])
    expected, state = gradients(model, labels), torch.get_rng_state()
    frozen = next(model.children()).eval()
    skips = skip_other_tokens(
        model, lambda: model(input_ids=IDS, attention_mask=MASK, labels=labels).loss
    )
    assert skips == (family in SKIP)
    assert (model.training, frozen.training) == (True, False)
    assert torch.equal(torch.get_rng_state(), state)
    assert any(isinstance(each, FirstTokenNorm) for each in model.modules()) == skips
    for found, known in zip(gradients(model, labels), expected, strict=True):
        torch.testing.assert_close(found, known, atol=1e-6, rtol=1e-4)
    compute_all_tokens(model)
    assert not any(isinstance(each, FirstTokenNorm) for each in model.modules())


def test_a_loss_of_all_tokens_and_one_that_depends_on_none() -> None:
    model, labels = build(AutoModelForTokenClassification, "bert"), torch.zeros_like(IDS)
    assert not skip_other_tokens(
        model, lambda: model(input_ids=IDS, attention_mask=MASK, labels=labels).loss
    )
    pooled = build(AutoModelForSequenceClassification, "bert")
    states = pooled.bert
    assert not skip_other_tokens(
        states, lambda: states(input_ids=IDS, attention_mask=MASK)[0].mean(dim=1).std()
    )
    torch.nn.init.zeros_(pooled.classifier.weight)  # a new head that has not learned to look
    assert not skip_other_tokens(
        pooled, lambda: pooled(input_ids=IDS, attention_mask=MASK, labels=labels[:, 0]).loss
    )
