"""The options of a language model's run, and the model that they ask for: adapters, and recomputation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from warnings import catch_warnings, simplefilter

from ...runtime.errors import ModelError, first_line
from ...training.options import BASE_MODEL, MOST_RATE, SCRATCH, Range, option
from ...training.text_task import RowOptions

MAMBAS = frozenset({"mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"})
"""Types of models whose ``out_proj`` peft refuses: their kernels read its weight past the adapter."""
FASTER = 10
"""How many times the usual learning rate adapters get by default, up to the usual maximum.

See https://thinkingmachines.ai/blog/lora/: large batches help them less. With 128 chats per step, the best
rate for 24 of 27 models in tinker-cookbook's sweep is 3e-4 or 1e-3, and 3e-3 diverges.
"""


@dataclass(frozen=True)
class LmOptions(RowOptions):
    """One training run of a language model."""

    task = "lm"
    metrics: ClassVar[Mapping[str, str]] = {"perplexity": "min"}
    model: str = option(
        "HuggingFaceTB/SmolLM2-135M",
        "a causal model's name on the hub, a folder with one, results/JOB, or 'scratch': a small new Llama",
        metavar="NAME|PATH",
    )
    max_length: int = option(512, "tokens per sample", within=Range(16, 8192))
    batch_size: int = RowOptions.redefine("batch_size", 8)
    chat_template: str | None = option(
        None, "Jinja template of chats (default: the tokenizer's own)", metavar="FILE"
    )
    train_on: str = option(
        "completions",
        "tokens to learn: completions and assistant turns, or all",
        choices=("completions", "all"),
    )
    lora: bool = option(
        False, "train adapters (LoRA) of all linear layers instead of the weights; needs peft"
    )
    lora_rank: int = option(4, "rank of the adapters", within=Range(1, 1024), needs="--lora")
    lora_alpha: int | None = option(
        None,
        "the adapters' scale times their rank (default: twice the rank)",
        kind=int,
        within=Range(1, 4096),
        needs="--lora",
    )
    gradient_checkpointing: bool = option(
        False, "recompute each layer in the backward pass: much less memory, more time"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora and self.model == SCRATCH:
            raise ValueError("--lora trains adapters of a model's weights, and 'scratch' has none")

    def highest_rate(self, ranks: int) -> float:
        rate = super().highest_rate(ranks)
        return min(rate * FASTER, MOST_RATE) if self.lora and self.learning_rate is None else rate


def prepare_model(model: Any, options: LmOptions) -> Any:
    """Return a model with adapters and recomputation, if the options ask for them."""
    if options.lora:
        model = add_adapters(model, options)
    if options.gradient_checkpointing:
        for each in _dropouts(model):
            each.p = 0.0
        # Renamed in transformers 5.
        enable = getattr(model, "activation_checkpointing_enable", None)
        try:
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        except ValueError as error:
            raise ModelError(
                f"model {options.model} can't recompute its layers: {error}",
                hint="omit --gradient-checkpointing",
            ) from error
    return model


def has_dropout(model: Any) -> bool:
    """Return whether training drops any values."""
    return any(each.p for each in _dropouts(model))


def _dropouts(model: Any) -> list[Any]:
    from torch import nn

    return [each for each in model.modules() if isinstance(each, nn.Dropout)]


def add_adapters(model: Any, options: LmOptions) -> Any:
    """Return peft's model with adapters of all linear layers but the head."""
    peft = import_peft()
    config = peft.LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha or 2 * options.lora_rank,
        target_modules="all-linear",
        exclude_modules=["out_proj"] if model.config.model_type in MAMBAS else None,
        task_type="CAUSAL_LM",
    )
    # peft records it, and the user's folder has another path than that on the nodes.
    model.name_or_path = os.environ.get(BASE_MODEL, model.name_or_path)
    with catch_warnings():
        simplefilter("ignore", FutureWarning)  # peft asks for a name that transformers has replaced
        try:
            model = peft.get_peft_model(model, config)
        except ValueError as error:
            raise ModelError(
                f"model {options.model} can't have adapters: {first_line(error)}",
                hint="omit --lora",
            ) from error
    # By default, it looks on the hub whether the vocabulary has changed.
    model.save_pretrained = partial(model.save_pretrained, save_embedding_layers=False)
    return model


def import_peft(needs: str = "--lora needs peft") -> Any:
    """Return peft. Raises :class:`ModelError` if the stack has none."""
    try:
        import peft

        return peft
    except ImportError as error:
        raise ModelError(
            f"{needs}: {error}", hint='add "peft" to the python_packages of your stack'
        ) from error
