"""Options of a training run: one definition for the laptop and the ranks.

The laptop builds a :class:`TrainOptions` and sends ``to_argv()``; every rank gets the same value back from
:func:`parse_argv`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

SAMPLE = Path(__file__).with_name("sample.json")
"""The demo's data: about a hundred questions on this project's subject, in SQuAD's layout."""
SCRATCH = "scratch"
"""The model name for a small DistilBERT with random weights and a tokenizer trained on the data."""
NO_CACHE = "none"
"""The token cache's name for no cache."""
ANY_RUN = frozenset(
    {
        "output",
        "eval",
        "token_cache",
        "checkpoint_every",
        "keep_checkpoints",
        "resume",
        "trial_seconds",
    }
)
"""Options that do not affect what is learned."""
MAY_CHANGE = frozenset({"epochs", "max_steps", "learning_rate", "warmup_ratio", "dtype"})
"""Options that do, but may change when a run is resumed, because the order of the data stays the same."""
BEFORE = {"attention_dropout": True, "compile": "off", "wire": "fp32"}
"""What runs did before these options existed, where it is not the default. Earlier checkpoints lack them."""
BASE_RATE, BASE_BATCH = 5e-5, 16
"""The default learning rate, and the features per step (of all ranks) for which it is meant."""


class Range(NamedTuple):
    """The values that a number may take, with both ends."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"


def _option(
    default: Any,
    text: str,
    *,
    kind: type | None = None,
    within: Range | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    kind = kind or (str if default is None else type(default))
    details = {"help": text, "kind": kind, "within": within, "choices": choices, "metavar": metavar}
    return field(default=default, metadata=details)


@dataclass(frozen=True)
class TrainOptions:
    """One training run. Raises ``ValueError``, with the flag and its range, for an invalid value.

    ``batch_size`` is per rank, in features (see :mod:`.features`); lengths are in tokens.
    """

    model: str = _option(
        "distilbert-base-uncased",
        "a model's name on the hub, a folder with one, or 'scratch': a small new DistilBERT",
        metavar="NAME|PATH",
    )
    data: str | None = _option(
        None, "training data, a SQuAD v1.1 JSON file (default: --dataset's)", metavar="PATH"
    )
    eval: str | None = _option(
        None,
        "evaluation data (default: --data itself, or the dataset's validation split)",
        metavar="PATH",
    )
    dataset: str = _option("squad", "dataset on the hub, if there is no --data", metavar="NAME")
    output: str = _option("output", "folder for the model and the results", metavar="DIR")
    epochs: int = _option(2, "passes over the training data", within=Range(1, 10_000))
    batch_size: int = _option(16, "features per step and rank", within=Range(1, 4096))
    learning_rate: float | None = _option(
        None,
        f"peak learning rate (default: {BASE_RATE} x sqrt(features per step of all ranks / "
        f"{BASE_BATCH}))",
        kind=float,
        within=Range(1e-8, 1),
    )
    warmup_ratio: float = _option(0.1, "share of steps with a rising rate", within=Range(0, 1))
    max_length: int = _option(384, "tokens per feature", within=Range(16, 8192))
    stride: int = _option(128, "tokens shared by two features of a passage", within=Range(0, 4096))
    seed: int = _option(42, "random seed", within=Range(0, 2**31 - 1))
    dtype: str = _option(
        "auto",
        "arithmetic; auto: bf16 if every CPU multiplies faster in it",
        choices=("auto", "bf16", "fp32"),
    )
    backend: str = _option(
        "auto",
        "torch.distributed's backend; auto: ccl if it is installed, else gloo",
        choices=("auto", "ccl", "gloo"),
    )
    accumulate: int = _option(
        1,
        "split each rank's batch into N parts: less memory, same result",
        metavar="N",
        within=Range(1, 4096),
    )
    compile: str = _option(
        "auto",
        "torch.compile; auto: for long runs in bf16, if the nodes have a compiler",
        choices=("auto", "on", "off"),
    )
    wire: str = _option("bf16", "gradients on the network", choices=("bf16", "fp32"))
    attention_dropout: bool = _option(
        False, "keep the model's dropout of attention weights: slower"
    )
    ipex: bool = _option(False, "use Intel Extension for PyTorch")
    skip_bad_records: bool = _option(False, "skip bad records instead of refusing the data")
    token_cache: str = _option(
        "~/.cache/spr-cluster/tokens",
        "folder for tokenized texts on the nodes, or 'none'",
        metavar="DIR",
    )
    max_steps: int | None = _option(
        None, "stop after N steps", metavar="N", kind=int, within=Range(1, 10**9)
    )
    checkpoint_every: int | None = _option(
        None,
        "steps between checkpoints (default: about every 10 minutes)",
        kind=int,
        within=Range(1, 10**9),
        metavar="STEPS",
    )
    keep_checkpoints: int = _option(
        2, "number of checkpoints to keep", within=Range(1, 1000), metavar="K"
    )
    resume: bool = _option(False, "continue from the newest checkpoint in the output folder")
    trial_seconds: int | None = _option(
        None,
        "only measure the speed, for about N seconds",
        metavar="N",
        kind=int,
        within=Range(1, 3600),
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(flag(each.name), getattr(self, each.name), each.metadata)
        if 2 * self.stride > self.max_length:
            raise ValueError(
                f"--stride {self.stride} is out of range: at most half of --max-length "
                f"({self.max_length}), or features would hardly advance"
            )
        if self.data is not None and self.dataset != "squad":
            raise ValueError("--data and --dataset can't be used together")

    def highest_rate(self, ranks: int) -> float:
        """Return the peak learning rate: the option, or one for the features per step of all ranks.

        It grows with the square root of the batch, which suits Adam: https://arxiv.org/abs/2205.10287.
        """
        if self.learning_rate is not None:
            return self.learning_rate
        return BASE_RATE * math.sqrt(self.batch_size * ranks / BASE_BATCH)

    def to_argv(self) -> list[str]:
        """Return the arguments from which :func:`parse_argv` restores this value."""
        argv = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value is True:
                argv.append(flag(each.name))
            elif value is not None and value is not False:
                # One word per option: a value may begin with a dash.
                argv.append(f"{flag(each.name)}={value}")
        return argv


def add_arguments(
    parser: argparse._ActionsContainer, without: Container[str] = frozenset()
) -> None:
    """Add this job's options to a parser; :func:`from_namespace` reads them back."""
    for each in fields(TrainOptions):
        if each.name in without:
            continue
        kind = each.metadata["kind"]
        text = each.metadata["help"]
        if kind is bool:
            parser.add_argument(
                flag(each.name), action="store_true", default=argparse.SUPPRESS, help=text
            )
            continue
        if each.default is not None and each.name != "model":
            text += f" (default: {each.default})"
        parser.add_argument(
            flag(each.name),
            type=kind,
            default=argparse.SUPPRESS,
            choices=each.metadata["choices"],
            metavar=each.metadata["metavar"],
            help=text,
        )


def from_namespace(namespace: argparse.Namespace, base: TrainOptions) -> TrainOptions:
    """Return ``base`` changed by a command line. Raises ``ValueError`` as :class:`TrainOptions` does."""
    given = {each.name for each in fields(TrainOptions)} & vars(namespace).keys()
    return replace(base, **{name: getattr(namespace, name) for name in given})


def parse_argv(argv: Sequence[str] | None = None) -> TrainOptions:
    """Return the options in ``argv``. A usage error is one line and exit code 2."""
    parser = _OneLineParser(
        prog="squad", description="Train question answering.", allow_abbrev=False
    )
    add_arguments(parser)
    namespace = parser.parse_args(argv)
    try:
        return from_namespace(namespace, TrainOptions())
    except ValueError as error:
        parser.error(str(error))


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def flag(name: str) -> str:
    """Return an option's name on the command line."""
    return f"--{name.replace('_', '-')}"


def _check(flag: str, value: Any, details: Any) -> None:
    within, choices = details["within"], details["choices"]
    if value is None:
        return
    # "Not inside" rather than "outside" also catches nan.
    if within is not None and not within.low <= value <= within.high:
        raise ValueError(f"{flag} {value} is out of range: {within}")
    if choices is not None and value not in choices:
        raise ValueError(f"{flag} {value!r} is unknown: one of {', '.join(choices)}")
    if value == "":
        raise ValueError(f"{flag} is empty")


DEMO = TrainOptions(
    model=SCRATCH,
    data=str(SAMPLE),
    epochs=40,
    batch_size=8,
    learning_rate=1.5e-3,
    compile="off",
)
"""Learns the sample by heart in seconds: a test of the machinery, not a good model."""
