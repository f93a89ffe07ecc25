"""Tasks whose model reads texts, among them those that learn from tables."""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from ..data.care import describe
from ..data.groups import Group
from ..data.mapped import Lazy
from ..data.readers import (
    EVAL,
    TRAIN,
    NoSplitError,
    first_rows,
    is_small,
    read_table,
    read_unseen,
    require_files,
    unused_files,
)
from ..data.records import require_text, show, skip_note
from ..data.table import Table, choose_column, read_records, with_class_names
from ..runtime.errors import DatasetError, ModelError
from ..runtime.events import name_files
from .options import NO_CACHE, SCRATCH, Range, TextOptions, option
from .task import Data, Loaded, Task

if TYPE_CHECKING:
    from ..data.token_cache import TokenCache
    from ..data.tokens import Column, TextSamples, Tokens
    from .state import TrainContext

BALANCED = "balanced"
_UNKNOWN = 0.005
"""The share of unknown tokens that is worth a note."""
_MISSING_SHOWN = 10
OwnText = TypeVar("OwnText", bound=TextOptions)


class Row(NamedTuple):
    """A row to predict for, and its place, such as ``line 3``."""

    place: str
    values: Any

    def text(self, name: str) -> str:
        """Return one of its texts. Raises :class:`DatasetError` with the place."""
        values = self.values if isinstance(self.values, dict) else {}
        return require_text(values.get(name), f"{self.place}: {name!r}")


class TextTask(Task[OwnText]):
    """A task of a model that reads texts."""

    head: ClassVar[str]
    """transformers' name of the task, such as "SequenceClassification"; empty for a model without a head."""
    takes_pair: ClassVar[bool] = False
    """Whether its models read a second text beside the first."""
    inputs: ClassVar[Sequence[str]] = ("text",)
    """What :meth:`predict` needs of a row, by name."""
    carried: ClassVar[Sequence[str]] = ()
    """Columns that :meth:`predict` reads besides, as they are, if a file has them."""
    adds: ClassVar[Collection[str]] = ()
    """The columns that `predict --data` adds to a file."""
    settings: ClassVar[Collection[str]] = ()
    """The options of `predict` that have an effect on this task's models."""
    shard_rows: ClassVar[int] = 8192
    """At most so many rows of a file are predicted and saved together."""
    autocasts: ClassVar[bool] = True
    """Whether :meth:`predict` computes under autocast, where bf16 is fast."""

    def download(self) -> None:
        from .model import load_pretrained  # noqa: PLC0415

        name = self.options.model_name
        if name and name != SCRATCH and not Path(name).is_dir():
            load_pretrained(name, self.head)

    @classmethod
    def has_trained(cls, folder: Path, architectures: Sequence[str]) -> bool:  # noqa: ARG003
        """Return whether a folder has a model of this task, by the names in its configuration."""
        # XLNet's is XLNetForQuestionAnsweringSimple.
        return any(f"For{cls.head}" in name for name in architectures)

    @classmethod
    def read_input(cls, name: str, value: Any, place: str) -> dict[str, Any]:
        """Return a column's value as :meth:`predict` reads it. Raises :class:`DatasetError`."""
        return {"words": value} if isinstance(value, list) else {name: require_text(value, place)}

    @classmethod
    def check_columns(
        cls, table: Table, columns: Mapping[str, str], settings: Mapping[str, Any]
    ) -> None:
        """Raise :class:`DatasetError` for a table's ``columns`` that :meth:`predict` would misread."""

    @classmethod
    def predicts_in(cls, settings: Mapping[str, Any]) -> str | None:  # noqa: ARG003
        """Return the type in which to load the weights for :meth:`predict`; ``None`` for fp32."""
        return None

    @classmethod
    def predict(cls, loaded: Loaded, rows: Sequence[Row]) -> list[dict[str, Any]]:  # noqa: ARG003
        """Return a trained model's prediction for each row. Raises :class:`DatasetError` with its place."""
        raise ModelError(f"`predict` can't use models of `train {cls.name}`")

    def encode_samples(
        self,
        context: TrainContext,
        loaded: Loaded,
        texts: Sequence[Sequence[str]],
        targets: Sequence[Any],
        *,
        offsets: bool = False,
    ) -> TextSamples:
        """Return samples of one text or two each: ``texts`` has one column or two.

        Texts are cut at ``max_length``; a note counts the cut ones.
        """
        from ..data.tokens import Column, TextSamples, read_template  # noqa: PLC0415

        columns = [Column(each, offsets) for each in texts]
        tokens = self.encode(context, loaded, columns)
        template = read_template(loaded.tokenizer, pair=len(texts) == 2)
        samples = TextSamples(tokens, template, targets, self.options.max_length)
        counts = zip(*(each.counts for each in tokens), strict=True)
        cut = sum(sum(each) > samples.room for each in counts)
        if cut:
            text = f"{cut} of {len(samples)} samples are longer than {samples.max_length} tokens and are cut"
            context.events.note(f"{text}; --max-length keeps more")
        return samples

    def encode(
        self, context: TrainContext, loaded: Loaded, columns: Sequence[Column]
    ) -> list[Tokens]:
        """Return each column's tokens, encoded by all ranks together or from the nodes' caches."""
        from ..data.token_cache import encode_together  # noqa: PLC0415

        cache, note = self.open_cache(), context.events.note
        encoded = encode_together(context.ranks, columns, loaded.tokenizer, cache, note)
        if context.ranks.first:
            _note_unknown(encoded, loaded.tokenizer, note)
        return encoded

    def open_cache(self) -> TokenCache | None:
        """Return the node's cache, if the options allow one."""
        from ..data.token_cache import TokenCache  # noqa: PLC0415

        name = self.options.token_cache
        return None if name == NO_CACHE else TokenCache(name)


@dataclass(frozen=True)
class RowOptions(TextOptions):
    """The location of a table's texts."""

    data: str | None = option(
        None,
        "training data: a CSV, TSV, JSON, JSON lines, Parquet, text, or CoNLL file, also gzipped; a folder "
        "with train and validation files, of Parquet files, or written by save_to_disk; such a file or "
        "folder in S3 (s3://…); or a name on the hub",
        metavar="PATH|NAME",
    )
    eval: str | None = option(
        None,
        "evaluation data (default: --eval-fraction, else the validation split, else --data)",
        metavar="PATH|NAME",
    )
    eval_fraction: float | None = option(
        None,
        "part of the training data to evaluate on instead",
        kind=float,
        within=Range(0.001, 0.9),
        metavar="SHARE",
    )
    text_column: str | None = option(None, "column with the texts", metavar="NAME")
    max_length: int = option(384, "tokens per text", within=Range(16, 8192))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval is not None and self.eval_fraction is not None:
            raise ValueError("--eval-fraction would have no effect beside --eval: omit one")


@dataclass(frozen=True)
class TableOptions(RowOptions):
    """The location of a table's texts and labels."""

    label_column: str | None = option(None, "column with the labels", metavar="NAME")
    class_weights: str | None = option(
        None,
        "weights of the classes in the loss: balanced (the rarer, the more), or a JSON file with a number "
        "for each class",
        metavar="balanced|FILE",
    )
    label_smoothing: float = option(
        0.0, "part of each label that is spread over all classes", within=Range(0, 0.99)
    )


OwnTable = TypeVar("OwnTable", bound=RowOptions)


class TableTask(TextTask[OwnTable]):
    """A task whose records are the rows of tables."""

    reads_hub = True
    other_columns: str = "labels"
    """What the columns after the first contain."""
    text_columns: ClassVar[Sequence[str]]
    label_columns: ClassVar[Sequence[str]]
    """Names of columns to look for, the likeliest first."""
    classes: Sequence[str] = ()
    """The labels or tags, by the numbers of the model's outputs."""
    _weights: Sequence[float] | None = None
    """The weight of each class in the loss."""

    def choose_columns(self, table: Table) -> list[str]:
        """Return the columns that :meth:`convert` gets: text and label. Raises :class:`DatasetError`."""
        options: Any = self.options
        text = choose_column(table, options.text_column, self.text_columns, "--text-column")
        label = choose_column(table, options.label_column, self.label_columns, "--label-column")
        return [text, label]

    @property
    def other_places(self) -> Sequence[str]:
        """Tables that the task reads besides ``--data`` and ``--eval``."""
        return ()

    def input_columns(self, table: Table) -> dict[str, str]:
        """Return the columns that `predict` needs, by what they contain."""
        return {"text": self.choose_columns(table)[0]}

    def convert(self, place: str, row: Any, *columns: Any) -> Any:
        """Return a row's record. Raises :class:`DatasetError`, beginning with the place."""
        raise NotImplementedError

    def read(self, note: Callable[[str], None]) -> Data:
        options, skipped = self.options, list[DatasetError]()
        cache = options.token_cache
        mapped = None if cache == NO_CACHE else Path(cache).expanduser()
        train = read_table(self.require_data(), TRAIN, mapped=mapped)
        unseen = train
        if options.eval is not None:
            unseen = read_table(options.eval, EVAL, mapped=mapped)
        elif options.eval_fraction is None:
            unseen = read_unseen(self.require_data(), mapped) or train
        # Also such as --corpus, and by the names that the user has given.
        given = {
            Path(name_files(each)).name for each in vars(options).values() if isinstance(each, str)
        }
        others = [each for each in unused_files(self.require_data()) if each not in given]
        if others:
            note(f"{self.require_data()}: did not read {', '.join(others)}")
        bad = skipped if options.skip_bad_records else None
        records = self._records(train, bad, note)
        eval_records = records if unseen is train else self._records(unseen, bad, note)
        eval_source = unseen.source
        if options.eval_fraction is not None:
            records, eval_records = split_off(records, options.eval_fraction, options.seed, note)
            eval_source = f"{options.eval_fraction:g} of {train.source}"
        if skipped:
            note(skip_note(skipped))
        return Data(records, train.source, eval_records, eval_source, self.input_columns(train))

    def _weigh(self, data: Data) -> None:
        """Weigh the classes of records with ``labels``. Raises :class:`DatasetError`."""
        options: Any = self.options
        counts = Counter(label for record in data.train for label in record.labels)
        self._weights = class_weights(options.class_weights, self.classes, counts)

    def download(self) -> None:
        super().download()
        for place, split in self._uses():
            if not Path(place).exists():
                read_table(place, split)

    def _uses(self) -> list[tuple[str, str]]:
        """Return the places of the data, with the split to read."""
        others = [(place, TRAIN) for place in self.other_places]
        unseen = [(self.options.eval, EVAL)] if self.options.eval is not None else []
        return [(self.require_data(), TRAIN), *unseen, *others]

    def check(self) -> str:
        """Check the data, of large files the first rows. Raises :class:`DatasetError`."""
        places = [*filter(None, (self.require_data(), self.options.eval))]
        if all(map(is_small, (*places, *self.other_places))):
            data = self.read(lambda _: None)
            self.check_data(data)
            return describe(data.train, data.eval if data.has_unseen else None)
        for place, split in self._uses():
            require_files(place, split)
        if self.options.eval is None and self.options.eval_fraction is None:
            with suppress(NoSplitError):
                require_files(self.require_data(), EVAL)
        bad = list[DatasetError]() if self.options.skip_bad_records else None
        for place in filter(lambda each: Path(each).is_file(), places):
            with first_rows(place) as table:
                if table.columns:  # Parquet may be readable only on the nodes
                    self._records(table, bad, lambda _: None)
        return ""

    def require_data(self) -> str:
        """Return the place of the training data. Raises :class:`DatasetError` if none is given."""
        if self.options.data is None:
            raise DatasetError(
                f"`train {self.name}` needs --data", hint="--demo trains on a small sample"
            )
        return self.options.data

    def _records(
        self, table: Table, skipped: list[DatasetError] | None, note: Callable[[str], None]
    ) -> Sequence[Any]:
        columns = self.choose_columns(table)
        first, *others = map(repr, columns)
        more = f", {self.other_columns} from {', '.join(others)}" if others else ""
        note(f"{table.source}: texts from column {first}{more}")
        table = with_class_names(table)
        return read_records(table, lambda place, row: self.convert(place, row, *columns), skipped)


def _note_missing(totals: Counter[str], taken: Container[str], note: Callable[[str], None]) -> None:
    """Name labels that --eval-fraction has held out no row of."""
    missing = [show(name) for name, _ in totals.most_common() if name not in taken]
    if missing:
        more = ", …" * (len(missing) > _MISSING_SHOWN)
        shown = ", ".join(missing[:_MISSING_SHOWN])
        note(f"--eval-fraction holds out no rows of {len(missing)} labels: {shown}{more}")


def _note_unknown(encoded: Sequence[Tokens], tokenizer: Any, note: Callable[[str], None]) -> None:
    """Name the share of tokens that stand for characters which the tokenizer does not know."""
    import numpy as np  # noqa: PLC0415

    total = sum(len(each.ids) for each in encoded)
    unknown = sum(int(np.count_nonzero(each.ids == tokenizer.unk_token_id)) for each in encoded)
    if unknown > _UNKNOWN * total:
        note(
            f"{100 * unknown / total:.1f} % of the tokens are unknown to this model's tokenizer: it lacks "
            "characters or languages of these texts"
        )


def class_weights(
    option: str | None, classes: Sequence[str], counts: Mapping[str, int]
) -> list[float] | None:
    """Return the weight of each class, as scikit-learn balances them or from a JSON file; None for none.

    ``counts`` are the labels in the training data; classes that they lack have the weight 1. Raises
    :class:`DatasetError` for a file that is not an object with a positive number for each label.
    """
    if option is None:
        return None
    if option == BALANCED:
        mean = sum(counts.values()) / len(counts)
        return [mean / counts.get(name, mean) for name in classes]
    try:
        found = json.loads(Path(option).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DatasetError(f"--class-weights {option}: can't be read: {error}") from None
    if not isinstance(found, dict):
        raise DatasetError(f'--class-weights {option}: is not an object such as {{"spam": 2.5}}')
    for name in counts:
        value = found.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
            shown = "no weight" if value is None else f"{value!r}, which is not a positive number,"
            raise DatasetError(f"--class-weights {option}: has {shown} for class {show(name)}")
    if unknown := [name for name in found if name not in classes]:
        raise DatasetError(f"--class-weights {option}: the data have no class {show(unknown[0])}")
    return [float(found.get(name, 1)) for name in classes]


def text_columns(records: Sequence[Any]) -> list[Sequence[str]]:
    """Return the columns of records' ``texts``, of which all have the same number."""

    def column(place: int) -> Sequence[str]:
        return Lazy(records, lambda _, record: str(record.texts[place]))

    return [column(place) for place in range(len(records[0].texts))]


def require_known(data: Data, kind: str, known: Collection[str]) -> None:
    """Raise :class:`DatasetError` for an evaluation record whose label or tag (``kind``) is unknown."""
    for record in data.eval:
        if unknown := [name for name in record.labels if name not in known]:
            raise DatasetError(
                f"{record.place}: the training data has no {kind} {show(unknown[0])}",
                hint=f"correct the {kind}, or leave the row out of the evaluation data",
            )


def _share_out(sizes: Mapping[str, int], share: float) -> Counter[str]:
    """Return how many records of each class to hold out: this share in total, by the largest remainders.

    Classes of at least two records have at least one, the larger first, while that takes at most half of
    the total. Each keeps one.
    """
    several = sorted((-size, name) for name, size in sizes.items() if size > 1)
    total = max(1, round(share * -sum(size for size, _ in several)))
    found = Counter(name for _, name in several[: max(1, total // 2)])
    # Negative numbers, as the first of a heap is the least: what is missing at a class's share.
    heap = [(found[name] + share * size, name) for size, name in several]
    heapify(heap)
    left = total - sum(found.values())
    while heap and left:
        missing, name = heappop(heap)
        if found[name] < sizes[name] - 1:
            found[name], left = found[name] + 1, left - 1
            heappush(heap, (missing + 1, name))
    return found


def split_off(
    records: Sequence[Any], share: float, seed: int, note: Callable[[str], None]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Split records; the second part has about this share, random but the same on every rank.

    It has about this share of each label or tag (:func:`_share_out`), and the first part has at least one of
    each. A record counts for its rarest label. All groups of a query are in one part.
    """
    if len(records) < 2:
        raise DatasetError("--eval-fraction needs at least two rows")
    labels = [{*getattr(record, "labels", ())} for record in records]
    totals, taken, chosen = Counter(chain.from_iterable(labels)), Counter[str](), set[int]()
    rarest = [min(each, key=lambda name: (totals[name], name), default="") for each in labels]
    wanted = _share_out(Counter(rarest), share)
    keys = [each.texts[0] if isinstance(each, Group) else n for n, each in enumerate(records)]
    together = dict[Any, list[int]]()
    for number, key in enumerate(keys):
        together.setdefault(key, []).append(number)
    for number in random.Random(seed).sample(range(len(records)), len(records)):
        others, name = together[keys[number]], rarest[number]
        fits = wanted[name] > 0 and (len(others) <= wanted[name] or not chosen)
        stay = (taken[each] + 1 < totals[each] for each in labels[number])
        if fits and len(chosen) + len(others) < len(records) and number not in chosen and all(stay):
            chosen.update(others)
            taken.update(labels[number])
            wanted[name] -= len(others)
    if not chosen:
        raise DatasetError(
            "--eval-fraction needs labels that occur at least twice, or several queries"
        )
    _note_missing(totals, taken, note)
    kept = array("q", (number for number in range(len(records)) if number not in chosen))
    numbered = Lazy(records, lambda _, record: record)
    return numbered.choose(kept), numbered.choose(sorted(chosen))
