"""What a training run can be told: one definition for the machine that submits and for the ranks.

The submitting machine builds a :class:`TrainOptions` and sends ``to_argv()``; every rank gets the
same value back from :func:`parse_argv`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

SAMPLE = Path(__file__).with_name("sample.json")
"""The demo's data: some hundred questions about this project's own subject, in SQuAD's layout."""
SCRATCH = "scratch"
"""The model name that stands for a small DistilBERT with random weights and a tokenizer
trained on the data."""
NO_CACHE = "none"
"""The token cache's name that stands for no cache."""
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
"""The options that have no part in what is learned."""
MAY_CHANGE = frozenset({"epochs", "max_steps", "learning_rate", "warmup_ratio", "dtype"})
"""Those that do, and that a resumed run may have otherwise: the data's order is still the same.
With any other option changed, a run is another run."""


BASE_RATE, BASE_BATCH = 5e-5, 16
"""The learning rate by default, and the features per step (of all ranks) that it is meant for."""


class Range(NamedTuple):
    """The values, both ends included, that a number may take."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"


def _option(
    default: Any,
    text: str,
    *,
    kind: type = str,
    within: Range | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    details = {"help": text, "kind": kind, "within": within, "choices": choices, "metavar": metavar}
    return field(default=default, metadata=details)


@dataclass(frozen=True)
class TrainOptions:
    """One training run. Raises ``ValueError``, naming the flag and what it takes, if it can't be.

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
        "evaluation data, likewise (default: --data itself, or the dataset's validation split)",
        metavar="PATH",
    )
    dataset: str = _option("squad", "dataset on the hub, used without --data", metavar="NAME")
    output: str = _option("output", "folder for the model and the results", metavar="DIR")
    epochs: int = _option(2, "passes over the training data", kind=int, within=Range(1, 10_000))
    batch_size: int = _option(16, "features per step and rank", kind=int, within=Range(1, 4096))
    learning_rate: float | None = _option(
        None,
        f"highest rate (default: {BASE_RATE} x the root of the features per step of all ranks / "
        f"{BASE_BATCH})",
        kind=float,
        within=Range(1e-8, 1),
    )
    warmup_ratio: float = _option(
        0.1, "share of the steps in which the rate rises", kind=float, within=Range(0, 1)
    )
    max_length: int = _option(384, "tokens per feature", kind=int, within=Range(16, 8192))
    stride: int = _option(
        128, "tokens that two features of one passage share", kind=int, within=Range(0, 4096)
    )
    seed: int = _option(42, "seed of everything random", kind=int, within=Range(0, 2**31 - 1))
    dtype: str = _option(
        "auto",
        "arithmetic; auto: bf16 where every CPU has it in hardware",
        choices=("auto", "bf16", "fp32"),
    )
    backend: str = _option(
        "auto",
        "torch.distributed's backend; auto: ccl where it is installed, else gloo",
        choices=("auto", "ccl", "gloo"),
    )
    accumulate: int = _option(
        1,
        "compute each rank's batch in so many parts, one after the other: less memory, same result",
        kind=int,
        within=Range(1, 4096),
    )
    compile: str = _option(
        "auto",
        "torch.compile; auto: in bf16, where the run is long enough and the nodes have a compiler",
        choices=("auto", "on", "off"),
    )
    wire: str = _option("bf16", "gradients on the network", choices=("bf16", "fp32"))
    attention_dropout: bool = _option(
        False, "keep the model's dropout of attention weights: slower", kind=bool
    )
    ipex: bool = _option(False, "use Intel Extension for PyTorch", kind=bool)
    skip_bad_records: bool = _option(
        False, "leave out records that can't be used, instead of refusing the data", kind=bool
    )
    token_cache: str = _option(
        "~/.cache/spr-cluster/tokens",
        "where the nodes keep tokenized texts for the next job; 'none': nowhere",
        metavar="DIR",
    )
    max_steps: int | None = _option(
        None, "stop after so many steps", kind=int, within=Range(1, 10**9)
    )
    checkpoint_every: int | None = _option(
        None,
        "steps from one checkpoint to the next (default: about every ten minutes)",
        kind=int,
        within=Range(1, 10**9),
        metavar="STEPS",
    )
    keep_checkpoints: int = _option(
        2, "the newest checkpoints that are kept", kind=int, within=Range(1, 1000), metavar="K"
    )
    resume: bool = _option(
        False, "go on from the newest checkpoint in the output folder", kind=bool
    )
    trial_seconds: int | None = _option(
        None,
        "measure the speed for about so long, instead of training to the end",
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
            raise ValueError("--data and --dataset exclude each other: give one of them")

    def highest_rate(self, ranks: int) -> float:
        """The learning rate: as given, or one that suits the features per step of all ranks.

        With the root of the batch, which is what suits Adam: https://arxiv.org/abs/2205.10287.
        """
        if self.learning_rate is not None:
            return self.learning_rate
        return BASE_RATE * math.sqrt(self.batch_size * ranks / BASE_BATCH)

    def to_argv(self) -> list[str]:
        """The arguments from which :func:`parse_argv` makes this value again."""
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
    """Give a parser this job's options; :func:`from_namespace` reads them back."""
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
    """``base`` with what a command line gave. Raises ``ValueError`` as :class:`TrainOptions` does."""
    given = {each.name for each in fields(TrainOptions)} & vars(namespace).keys()
    return replace(base, **{name: getattr(namespace, name) for name in given})


def parse_argv(argv: Sequence[str] | None = None) -> TrainOptions:
    """The options in ``argv``; a mistake is printed in one line and ends with exit code 2."""
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
    """An option's name on the command line."""
    return f"--{name.replace('_', '-')}"


def _check(flag: str, value: Any, details: Any) -> None:
    within, choices = details["within"], details["choices"]
    if value is None:
        return
    # "not inside" rather than "outside": it also catches nan.
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
)
"""Learns the sample by heart in seconds: it shows that the machinery works, not a good model."""
