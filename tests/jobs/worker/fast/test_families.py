"""Fast attention in each family of models that transformers can build small: outputs and gradients."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from jobs.worker.fast.attention import NAME, use_products

SIZES = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "d_model", "dim", "emb_dim", "n_embd", "embedding_size"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "d_ff", "n_inner", "ffn_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 544),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sliding_window": 100,
    "initializer_range": 0.2,  # with weights of the usual size, outputs hardly depend on the mask
}
DECODERS = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox"),
    *("opt", "phi", "phi3", "cohere", "olmo", "olmo2", "stablelm", "starcoder2", "granite"),
    *("helium", "glm", "glm4", "smollm3", "bloom", "falcon", "mpt"),
)
ENCODERS = (
    *("bert", "distilbert", "roberta", "albert", "electra", "xlm-roberta", "camembert", "mpnet"),
    *("modernbert", "deberta", "deberta-v2", "ernie", "convbert", "fnet", "roformer"),
    *("megatron-bert", "xlm", "nystromformer"),
)
BOTH = ("bart", "mbart", "t5", "mt5", "m2m_100", "pegasus", "marian", "blenderbot", "led")
FAMILIES = [
    *((AutoModelForCausalLM, name) for name in DECODERS),
    *((AutoModelForMaskedLM, name) for name in ENCODERS),
    *((AutoModelForSeq2SeqLM, name) for name in BOTH),
]
SWITCHED = {
    *("llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "phi", "opt", "bert", "distilbert"),
}
# With other masks, positions, or scores; two of which use no function that could be replaced.
OTHERS = {"gemma2", "modernbert", "bart", "bloom", "t5"}


def build(auto: Any, name: str) -> Any:
    known = vars(AutoConfig.for_model(name))
    config = AutoConfig.for_model(name, **{k: v for k, v in SIZES.items() if k in known})
    torch.manual_seed(0)
    return auto.from_config(config).eval()  # without dropout


def compute(model: Any, width: int, rows: int) -> list[torch.Tensor]:
    torch.manual_seed(width)
    ids = torch.randint(3, 32, (3, width))
    mask = torch.ones_like(ids)
    mask[0, width * 2 // 3 :] = 0
    mask[1, : width // 3] = 0
    ids, mask = ids[:rows], mask[:rows]
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    model.zero_grad()
    if model.config.model_type in DECODERS:
        mask = torch.ones_like(mask)  # the first word is predicted from padding on the left
    logits = model(**inputs).logits[mask == 1].float()
    logits.log_softmax(-1)[:, 3].mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [logits.detach(), torch.cat([each.flatten() for each in gradients])]


def check(auto: Any, name: str, widths: tuple[int, ...], *rows: int) -> None:
    model, plain = build(auto, name), build(auto, name)
    switched = bool(use_products(model))
    assert switched is (model.config._attn_implementation == NAME)
    assert switched or name not in SWITCHED
    if not switched:  # its own attention, in which nothing was changed
        assert model.config._attn_implementation == plain.config._attn_implementation
        return
    for case in product(widths, rows):
        for found, one in zip(compute(model, *case), compute(plain, *case), strict=True):
            assert (found - one).norm() <= 1e-4 * one.norm(), case


@pytest.mark.parametrize(
    ("auto", "name"), [(auto, name) for auto, name in FAMILIES if name in SWITCHED | OTHERS]
)
def test_fast_attention_has_the_same_outputs_and_gradients(auto: Any, name: str) -> None:
    check(auto, name, (150, 400), 3)


@pytest.mark.full
@pytest.mark.parametrize(("auto", "name"), FAMILIES, ids=lambda each: str(each).split(".")[-1])
def test_fast_attention_in_more_families_at_more_lengths(auto: Any, name: str) -> None:
    check(auto, name, (17, 99, 101, 128, 129, 150, 384, 385, 400, 512), 1, 3)
