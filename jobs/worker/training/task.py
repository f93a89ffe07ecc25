"""The interface of a task: the part of training that is specific to it. The engine does the rest.

A task is a class of one file in :mod:`..tasks` and one line of its table; CONTRIBUTING.md writes one. The
laptop imports it for its options, and has no torch: imports that need torch or transformers are in methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from ..runtime.errors import DatasetError
from .options import TrainOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from .state import TrainContext

Own = TypeVar("Own", bound=TrainOptions)


class Loaded(NamedTuple):
    """A ``torch.nn.Module`` to train and, for texts, its tokenizer.

    ``new_weights`` are the names of weights that its files lack, which are random. ``own`` are the
    configuration's values that training replaced, to be restored in the saved model. ``other_classes`` are
    those of the files whose weights were replaced, because the data has others. ``settings`` are the options
    of `predict`, by name. ``cut`` counts the texts that `predict` has cut, by their tokens after that.
    """

    model: Any
    tokenizer: Any = None
    new_weights: tuple[str, ...] = ()
    own: Mapping[str, float] = MappingProxyType({})
    other_classes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = MappingProxyType({})
    cut: Counter[int] | None = None

    @property
    def pad_token(self) -> int:
        """The token that pads a batch's shorter rows; it is masked, so any value works."""
        return self.tokenizer.pad_token_id or 0

    @property
    def has_several_labels(self) -> bool:
        """Whether a text may have several labels."""
        config = getattr(self.model, "config", None)
        return getattr(config, "problem_type", None) == "multi_label_classification"


class Samples(Protocol):
    """A data set as the model reads it: samples in their order, assembled on access."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Every sample's number of tokens: those of similar length share a batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def token_ids(self) -> NDArray[np.int64] | None:
        """Return all token IDs that :meth:`Task.collate` may put into a batch, ascending; None if unknown.

        The embeddings of others are not trained. The token for padding need not be among them.
        """

    def digest(self) -> str:
        """Return a digest of all samples: the data may change under the same path."""


class Data(NamedTuple):
    """The records for training and evaluation, with their sources."""

    train: Sequence[Any]
    train_source: str
    eval: Sequence[Any]
    eval_source: str
    columns: Mapping[str, str] = MappingProxyType({})
    """Those that `predict` needs, by what they contain; the model's configuration keeps them."""

    @property
    def has_unseen(self) -> bool:
        """Whether the records for evaluation are not those for training."""
        return self.eval_source != self.train_source


FILES = ("predictions", "null_odds")
"""What :meth:`Task.evaluate` returns for JSON files of their own."""


class Task(ABC, Generic[Own]):
    """One task, with the options of a run."""

    name: ClassVar[str]
    reads_hub: ClassVar[bool] = False
    """``--data`` may be a name on the hub."""
    help: ClassVar[str]
    """A line of the command's help."""
    scores: ClassVar[Mapping[str, str]] = {}
    """What a report calls the figures of :meth:`evaluate`; those that are not here keep their names."""
    shares: ClassVar[Collection[str]] = ()
    """Those of the scores that are the percentage of records that are right."""
    plain_scores: ClassVar[Mapping[str, str]] = {}
    """Those that are not percentages, with their format if they are not shown with decimals."""
    pipeline_tag: ClassVar[str] = ""
    """The hub's name of the task, if transformers or sentence-transformers load its models."""
    Options: type[Own]
    demo: Own
    """Options of `--demo`."""

    def __init__(self, options: Own) -> None:
        self.options = options

    def check_data(self, data: Data) -> None:
        """Raise :class:`DatasetError` if the options ask for what the data do not allow."""
        if self.options.asks_for_evaluations and not data.has_unseen:
            raise DatasetError(
                "--eval-every and --patience need data that the model is not trained on",
                hint="--eval names some, or --eval-fraction sets a part of a table aside",
            )

    def download(self) -> None:
        """Download everything the run needs from the hub into its cache. Raises :class:`WorkerError`."""

    def check(self) -> str:
        """Check the data on the laptop, without torch. Raises :class:`DatasetError`.

        Returns what is unusual about the data, or "".
        """
        return ""

    @abstractmethod
    def read(self, note: Callable[[str], None]) -> Data:
        """Return the checked records. Raises :class:`DatasetError` with file, row, and column."""

    @abstractmethod
    def load(self, context: TrainContext, data: Data) -> Loaded:
        """Return the model to train, the same on every rank. Raises :class:`ModelError`."""

    @abstractmethod
    def prepare(self, context: TrainContext, loaded: Loaded, records: Sequence[Any]) -> Samples:
        """Return the records as samples, the same on every rank. Raises :class:`DatasetError`."""

    def finish(self, context: TrainContext, loaded: Loaded, samples: Any) -> Samples:
        """Return the training samples with what the untrained model adds, the same on every rank."""
        found: Samples = samples
        return found

    @abstractmethod
    def collate(self, samples: Sequence[Any], loaded: Loaded) -> dict[str, Tensor]:
        """Return a batch for :meth:`loss`; the first dimension of each tensor are the samples."""

    def weights(self, samples: Samples) -> NDArray[Any] | None:
        """Return each sample's weight in the mean loss: 1 (``None``), or the sum of its labels' weights."""
        return None

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean loss of a batch, over its samples or, with :meth:`weights`, its labels."""
        loss: Tensor = model(**batch).loss
        return loss

    def evaluation_tokens(self, samples: Any) -> int:
        """Return how many tokens :meth:`evaluate` reads."""
        return int(samples.lengths.sum())

    @abstractmethod
    def evaluate(
        self, context: TrainContext, loaded: Loaded, records: Sequence[Any], samples: Any
    ) -> dict[str, Any]:
        """Return the trained model's figures, for ``results.json``; all ranks call it together.

        What rank 0 returns under the names in :data:`FILES` is saved in files instead.
        """


def pick_scores(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores among the figures of :meth:`Task.evaluate`."""
    floats = {name: score for name, score in figures.items() if isinstance(score, float)}
    found: dict[str, float] = figures.get("scores", floats)
    return found
