"""Small causal models for chats: random weights, and a tokenizer of bytes without a padding token."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from jobs.worker.tasks.lm.task import SHAPE

END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
MARKED = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def new_chat_tokenizer(texts: Iterable[str], template: str | None = CHATML) -> Any:
    """Return a tokenizer of bytes, and of their pairs that are frequent in these texts."""
    tokenizer = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[END, TURN, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        additional_special_tokens=[TURN, TURN_END],
        model_input_names=["input_ids", "attention_mask"],
    )
    found.chat_template = template
    return found


def save_chat_model(folder: Path, tokenizer: Any, **shape: Any) -> Path:
    """Write a Llama model with random weights, and the tokenizer, into a folder."""
    torch.manual_seed(1)
    config = LlamaConfig(
        **{
            **SHAPE,
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
            "tie_word_embeddings": True,
            **shape,
        }
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
