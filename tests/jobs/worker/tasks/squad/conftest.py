from __future__ import annotations

from typing import Any

import pytest
import torch

from jobs.worker.training.task import Loaded


@pytest.fixture(scope="package")
def loaded(tokenizer: Any) -> Loaded:
    """A model with random weights, so that any difference shows."""
    from transformers import DistilBertConfig, DistilBertForQuestionAnswering

    torch.manual_seed(3)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    config = DistilBertConfig(vocab_size=len(tokenizer), **shape)
    return Loaded(DistilBertForQuestionAnswering(config).eval(), tokenizer)
