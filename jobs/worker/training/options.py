"""Options of a training run: one definition for the laptop and the ranks.

The laptop builds a :class:`TrainOptions` and sends it as JSON; every rank reads the same value. A task adds
options, or other defaults, in a subclass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..runtime.trackers import TRACKERS

S3, HUB = "s3://", "hub:"
EXPORTED = "openvino/openvino_model.xml"
"""In a model's folder: its form for OpenVINO."""
SCRATCH = "scratch"
"""The model name for a small DistilBERT with random weights and a tokenizer trained on the data."""
BASE_MODEL = "SPR_BASE_MODEL"
"""The environment variable with the user's path of a local model, which is in another folder on the nodes."""
NEVER = 10**9
"""The steps between checkpoints that disable them, also at the end."""
NO_CACHE = "none"
"""The token cache option that disables the cache."""
ANY_RUN = frozenset(
    {
        *("output", "eval", "corpus", "token_cache", "max_answer_length", "eval_every", "patience"),
        *("checkpoint_every", "keep_checkpoints", "resume", "trial_seconds", "report_to"),
        *("push_to", "export", "max_loss"),
    }
)
"""Options that do not affect what is learned."""
MAY_CHANGE = frozenset({"epochs", "max_steps", "learning_rate", "warmup_ratio", "dtype"})
"""Options that do, but may change on resume, because the order of the data stays the same."""
BASE_RATE, BASE_BATCH = 5e-5, 16
"""The default learning rate, and the samples per step (of all ranks) that it is meant for."""
MOST_RATE = 5e-4
"""The highest default rate, from 1,600 samples per step. With 512, MiniLM learned best at 1.1e-3, the highest
rate tried (benchmarks/log.jsonl). Higher rates were not tried, nor wider models, which may tolerate less."""

_EVAL_TIMES = ("auto", "epoch", "never")

SMALL: Mapping[str, Any] = MappingProxyType(
    {"model": SCRATCH, "epochs": 40, "batch_size": 8, "learning_rate": 1.5e-3, "compile": "off"}
)
"""The demos' options: they memorize a sample in seconds, to test the machinery, not for a good model."""

Own = TypeVar("Own", bound="TrainOptions")


class Range(NamedTuple):
    """The allowed range of a number, inclusive."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"


def is_url(name: str) -> bool:
    """Return whether data are in S3, from which each node reads them."""
    return name.startswith(S3)


def is_exported(model: str) -> bool:
    """Return whether a model's folder has its form for OpenVINO, which this machine can compute with."""
    return Path(model, EXPORTED).is_file() and find_spec("openvino") is not None


def option(
    default: Any,
    text: str,
    *,
    kind: type | None = None,
    within: Range | None = None,
    choices: tuple[str, ...] | None = None,
    several: tuple[str, ...] = (),
    metavar: str | None = None,
    needs: str = "",
) -> Any:
    """Return a dataclass field that is also an option of the command line, with ``text`` as its help.

    A value is one of ``choices``, or one or several of ``several``, separated by commas. Without the flag
    ``needs``, it would have no effect.
    """
    kind = kind or (str if default is None else type(default))
    details = {"help": text, "kind": kind, "within": within, "choices": choices}
    details |= {"several": several, "metavar": metavar, "needs": needs}
    return field(default=default, metadata=details)


@dataclass(frozen=True)
class TrainOptions:
    """One training run of any task. Raises ``ValueError``, with the flag and its range, for an invalid value.

    ``batch_size`` is per rank, in samples: one sample is one row of a batch.
    """

    task: ClassVar[str] = ""
    """The task's name."""
    splits_batches: ClassVar[bool] = True
    """Whether a rank may compute its batch in parts, with the same result."""
    batches_sharing_lengths: ClassVar[int] = 1
    """The number of batches over which samples are spread that follow each other by length."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """The scores by which the best model can be chosen, the default first: "max" or "min" is best."""

    output: str = option("output", "folder for the model and the results", metavar="DIR")
    epochs: int = option(
        2, "passes over the training data; 0 only evaluates --model", within=Range(0, 10_000)
    )
    batch_size: int = option(16, "features per step and rank", within=Range(1, 4096))
    learning_rate: float | None = option(
        None,
        f"peak learning rate (default: {BASE_RATE} x sqrt(features per step of all ranks / "
        f"{BASE_BATCH}), at most {MOST_RATE})",
        kind=float,
        within=Range(1e-8, 1),
    )
    warmup_ratio: float = option(0.1, "share of steps with a rising rate", within=Range(0, 1))
    lr_schedule: str = option(
        "linear",
        "the rate after that: it falls to 0 linearly or as a cosine, or stays constant",
        choices=("linear", "cosine", "constant"),
    )
    weight_decay: float = option(
        0.0, "AdamW's weight decay, not of biases and norms", within=Range(0, 1)
    )
    max_grad_norm: float = option(
        1.0, "clip the norm of the gradients to this", within=Range(1e-6, 1e6)
    )
    seed: int = option(42, "random seed", within=Range(0, 2**31 - 1))
    dtype: str = option(
        "auto",
        "arithmetic; auto: bf16 if every CPU multiplies faster in it; int8: products in compiled layers",
        choices=("auto", "bf16", "fp32", "int8"),
    )
    backend: str = option(
        "auto",
        "torch.distributed's backend; auto: ccl if it is installed, else gloo",
        choices=("auto", "ccl", "gloo"),
    )
    accumulate: int = option(
        1,
        "split each rank's batch into N parts: less memory, same result",
        metavar="N",
        within=Range(1, 4096),
    )
    compile: str = option(
        "auto",
        "torch.compile; auto: in bf16, if the run is long enough to pay for it and the nodes have a compiler",
        choices=("auto", "on", "off"),
    )
    wire: str = option("bf16", "gradients on the network", choices=("bf16", "fp32"))
    ipex: bool = option(False, "use Intel Extension for PyTorch")
    max_steps: int | None = option(
        None, "stop after N steps", metavar="N", kind=int, within=Range(1, 10**9)
    )
    eval_every: str = option(
        "auto",
        "evaluate while training: after every so many steps, each epoch, or never; auto: each epoch, if "
        "there are evaluation data and it takes less than a tenth of the time",
        metavar="STEPS|epoch|never",
    )
    metric: str | None = option(None, "the score that chooses the best model", metavar="NAME")
    keep: str = option(
        "best", "the model to keep, of those that were evaluated", choices=("best", "last")
    )
    patience: int | None = option(
        None,
        "stop after N evaluations without a better score",
        metavar="N",
        kind=int,
        within=Range(1, 10_000),
    )
    checkpoint_every: int | None = option(
        None,
        "steps between checkpoints (default: about every 10 minutes)",
        kind=int,
        within=Range(1, NEVER),
        metavar="STEPS",
    )
    keep_checkpoints: int = option(
        2, "number of checkpoints to keep", within=Range(1, 1000), metavar="K"
    )
    report_to: str = option(
        "auto",
        f"where metrics go: one or several of {', '.join(TRACKERS)}, separated by commas; none; or auto: "
        "TensorBoard files, if the nodes have the package",
        metavar="TRACKERS",
        several=tuple(TRACKERS),
        choices=("auto", "none"),
    )
    push_to: str | None = option(None, "the model's place on the hub, hub:ORG/NAME")
    resume: bool = option(False, "continue from the newest checkpoint in the output folder")
    trial_seconds: int | None = option(
        None,
        "only measure the speed, for about N seconds",
        metavar="N",
        kind=int,
        within=Range(1, 3600),
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(flag(each.name), getattr(self, each.name), each.metadata)
        if self.eval_every not in _EVAL_TIMES and not _is_count(self.eval_every):
            raise ValueError(
                f"--eval-every {self.eval_every!r} is neither a number of steps, from 1, nor one of "
                f"{', '.join(_EVAL_TIMES)}"
            )
        if self.metric is not None and self.metric not in self.metrics:
            known = ", ".join(self.metrics) or "none: this task chooses no best model"
            raise ValueError(f"--metric {self.metric!r} is unknown: one of {known}")
        if self.dtype == "int8" and (self.compile == "off" or self.ipex):
            raise ValueError(
                "--dtype int8 is for layers that torch.compile compiles, not with --compile off or --ipex"
            )
        if self.eval_every == "never" and self.patience is not None:
            raise ValueError("--patience needs evaluations, which --eval-every never omits")
        if self.asks_for_evaluations and not self.metrics:
            raise ValueError(
                "--eval-every and --patience: this task has no score to choose a model by"
            )

    @property
    def asks_for_evaluations(self) -> bool:
        """Whether the run is to be evaluated while training, at any cost."""
        return self.eval_every not in ("auto", "never") or self.patience is not None

    @property
    def model_name(self) -> str | None:
        """The name of the pretrained model, if there is one."""
        return None

    @classmethod
    def redefine(cls, name: str, default: Any) -> Any:
        """Return an option of this class with another default, for a subclass."""
        known = next(each for each in fields(cls) if each.name == name)
        return field(default=default, metadata=known.metadata)

    def highest_rate(self, ranks: int) -> float:
        """Return the peak learning rate: the option, or a value for the samples per step of all ranks.

        It grows with the square root of the batch, as in https://arxiv.org/abs/2205.10287. Adam's betas stay:
        the paper's first one falls to 0 at 160 samples, and 0 gave no better accuracy at 512.
        """
        if self.learning_rate is not None:
            return self.learning_rate
        return min(BASE_RATE * math.sqrt(self.batch_size * ranks / BASE_BATCH), MOST_RATE)

    def to_json(self, indent: int | None = None) -> str:
        """Return the argument from which :meth:`from_json` restores this value."""
        return json.dumps(asdict(self), indent=indent)

    @classmethod
    def from_json(cls: type[Own], text: str) -> Own:
        """Return the result of :meth:`to_json`. Raises ``ValueError`` or ``TypeError`` for another text."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class TextOptions(TrainOptions):
    """One training run of a model that reads texts; lengths are in tokens."""

    model: str = option(
        "distilbert-base-uncased",
        "a model's name on the hub, a folder with one, results/JOB, or 'scratch': a small new DistilBERT",
        metavar="NAME|PATH",
    )
    data: str | None = option(None, "training data, a file or s3://…", metavar="PATH")
    eval: str | None = option(
        None,
        "evaluation data (default: --data itself, or the dataset's validation split)",
        metavar="PATH",
    )
    max_length: int = option(384, "tokens per feature", within=Range(16, 8192))
    attention_dropout: str = option(
        "off",
        "keep the model's dropout of attention weights; costs up to half the speed without torch.compile",
        choices=("on", "off"),
    )
    freeze_layers: str | None = option(
        None,
        "do not train the embeddings and the first N layers, or the embeddings alone",
        metavar="N|embeddings",
    )
    layer_decay: float = option(
        1.0,
        "multiply the learning rate by this for each layer below the head",
        within=Range(0.01, 1),
    )
    skip_bad_records: bool = option(False, "skip bad records instead of refusing the data")
    token_cache: str = option(
        "~/.cache/spr-cluster/tokens",
        "folder for tokenized texts on the nodes, or 'none'",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        frozen = self.freeze_layers
        if frozen not in (None, "embeddings") and not _is_count(frozen):
            raise ValueError(
                f"--freeze-layers {frozen!r} is neither a number of layers, from 1, nor embeddings"
            )

    @property
    def model_name(self) -> str | None:
        return self.model


@dataclass(frozen=True)
class EncoderOptions(TextOptions):
    """One training run of an encoder."""

    export: str | None = option(
        None,
        "also write the trained model for OpenVINO, in int8 if that keeps --max-loss",
        choices=("int8", "bf16"),
    )
    max_loss: float = option(
        0.5,
        "points of the score that the exported model may lose",
        within=Range(0, 100),
        needs="--export",
    )


def defined_options(options: type[TrainOptions]) -> list[Field[Any]]:
    """Return the fields of a task's options: its own before those of every task."""
    *own, every = [each for each in options.__mro__ if issubclass(each, TrainOptions)]
    names = [name for each in (*reversed(own), every) for name in vars(each)["__annotations__"]]
    known = {each.name: each for each in fields(options)}
    return [known[name] for name in dict.fromkeys(names) if name in known]


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
    if several := details["several"]:
        _check_several(flag, value, several, choices)
    elif choices is not None and value not in choices:
        raise ValueError(f"{flag} {value!r} is unknown: one of {', '.join(choices)}")
    if value == "":
        raise ValueError(f"{flag} is empty")


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) < 10**9


def _check_several(flag: str, value: str, names: Sequence[str], alone: Sequence[str]) -> None:
    for word in () if value in alone else value.split(","):
        if word not in names:
            near = get_close_matches(word, [each for each in (*names, *alone) if each != word], 1)
            raise ValueError(
                f"{flag} {value!r}: expected {', '.join(alone)}, or one or several of {', '.join(names)}, "
                "separated by commas" + (f"; did you mean {near[0]}?" if near else "")
            )
