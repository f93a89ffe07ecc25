"""Classify texts or pairs of texts, with one label or several."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..data.records import SKIP_HINT, require_text, show
from ..data.table import Table, choose_column
from ..runtime.errors import DatasetError, ModelError
from ..training.options import SMALL, Range, option
from ..training.task import Data, Loaded
from ..training.teacher import TaughtTask, TeacherOptions, load_student
from ..training.text_task import Row, TableOptions, require_known, text_columns

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ..data.tokens import TextSample, TextSamples
    from ..training.state import TrainContext

HEAD = "SequenceClassification"
MOST_CLASSES_SHOWN = 100
"""With more classes, the results contain no confusion matrix."""
MOST_COUNTS_SHOWN = 10
_PAIRS = (
    *(("premise", "hypothesis"), ("sentence1", "sentence2"), ("text1", "text2")),
    *(("question1", "question2"), ("question", "sentence"), ("question", "passage")),
)
"""Columns with the two texts of pairs."""
_ITEM = r"""(?:'[^']*'|"[^"]*"|-?[\d.]+(?:e[-+]?\d+)?|True|False|None|nan)"""
_WRITTEN_LIST = re.compile(rf"""\[\s*(?:['"].*|{_ITEM}(?:[\s,]+{_ITEM})+)[\s,]*\]""", re.DOTALL)
"""A list of labels, as pandas or numpy write it in a text, and no name such as [1]."""
_BITS = {"0", "1", "0.0", "1.0", "False", "True"}


@dataclass(frozen=True)
class ClassifyOptions(TableOptions, TeacherOptions):
    """One training run of a classifier."""

    task = "classify"
    metrics: ClassVar[Mapping[str, str]] = {
        "macro_f1": "max",
        "accuracy": "max",
        "exact_match": "max",
    }
    pair_column: str | None = option(None, "column with the second text of pairs", metavar="NAME")
    label_separator: str | None = option(
        None, "what separates several labels of a text, such as ';'", metavar="TEXT"
    )
    distill_temperature: float = option(
        2.0,
        "divides both models' logits before the softmax that the student learns",
        within=Range(0.1, 100),
        needs="--teacher",
    )
    epochs: int = TableOptions.redefine("epochs", 3)
    max_length: int = TableOptions.redefine("max_length", 128)


class Labeled(NamedTuple):
    """A row: one text or two, and its labels."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    place: str


class Classify(TaughtTask[ClassifyOptions]):
    """``accuracy`` and ``macro_f1`` in the results are percentages; with several labels, ``exact_match``
    counts the texts with all of them right."""

    name = "classify"
    Options = ClassifyOptions
    demo = ClassifyOptions(data=str(Path(__file__).with_name("classify.sample.jsonl")), **SMALL)
    help = "classify texts or pairs of texts, one label each or several"
    scores: ClassVar[Mapping[str, str]] = {
        "exact_match": "all labels right",
        "macro_f1": "macro F1",
    }
    shares = ("accuracy", "exact_match")
    takes_pair = True
    adds = ("label", "probability", "labels", "probabilities")
    pipeline_tag = "text-classification"
    head = HEAD
    text_columns = (
        *("text", "sentence", "sentence1", "premise", "question"),
        *("content", "description", "text1", "question1"),
    )
    label_columns = ("label", "labels", "class", "category", "target", "section")

    def __init__(self, options: ClassifyOptions) -> None:
        super().__init__(options)
        if options.pair_column:
            self.other_columns = "label and second text"
        self._several: bool | None = True if options.label_separator else None
        """Whether each label is a list; None before the first."""
        self._kind: type | None = None
        self._bits = set[int]()
        """The lengths of the lists of labels so far; 0 for one with others than 0 and 1."""

    def choose_columns(self, table: Table) -> list[str]:
        asked = self.options.pair_column
        pair = [choose_column(table, asked, (), "--pair-column")] if asked else []
        text, label = super().choose_columns(table)
        names = {each.strip() for each in table.columns} - {label.strip()}
        for first, second in () if asked or self.options.text_column else _PAIRS:
            if text.strip() in (first, second) and names >= {first, second}:
                raise DatasetError(
                    f"{table.source}: has pairs of texts, in {first!r} and {second!r}",
                    hint=f"use --text-column {first} --pair-column {second}, or --text-column {text.strip()} "
                    "to learn from it alone",
                )
        return [text, label, *pair]

    def _records(
        self, table: Table, skipped: list[DatasetError] | None, note: Callable[[str], None]
    ) -> Sequence[Any]:
        found = super()._records(table, skipped, note)
        if len(self._bits) == 1 and max(self._bits) > 1:
            raise DatasetError(
                f"{table.source}: its lists of labels have a 0 or 1 for each class",
                hint='list the names of the labels instead, such as ["sports", "news"]',
            )
        return found

    def input_columns(self, table: Table) -> dict[str, str]:
        text, _, *pair = self.choose_columns(table)
        return dict(zip(("text", "pair"), [text, *pair], strict=False))

    def convert(self, place: str, row: Any, text: str, label: str, *pair: str) -> Labeled:
        texts = []
        for column in (text, *pair):
            if column not in row:
                raise DatasetError(f"{place}: has no column {column!r}")
            texts.append(require_text(row[column], f"{place}: column {column!r}").strip())
        labels = self._labels(f"{place}: column {label!r}", row.get(label))
        return Labeled(tuple(texts), labels, place)

    def _labels(self, what: str, value: Any) -> tuple[str, ...]:
        separator = self.options.label_separator
        if isinstance(value, str) and _WRITTEN_LIST.fullmatch(value.strip()):
            raise DatasetError(
                f"{what} is a list, written as a text: {show(value)}",
                hint="write lists in JSON lines, or the names with --label-separator between them",
            )
        if separator is not None and isinstance(value, str):
            value = [each.strip() for each in value.split(separator) if each.strip()]
        several, each = isinstance(value, list), value if isinstance(value, list) else [value]
        labels = tuple(dict.fromkeys(self._label(what, one) for one in each))
        self._several = several if self._several is None else self._several
        if several != self._several:
            has, others = ("one label", "a list of labels")[:: -1 if several else 1]
            raise DatasetError(f"{what} has {has}, and other rows {others}")
        if several:
            self._bits.add(len(value) if {*map(str, value)} <= _BITS else 0)
        return labels

    def _label(self, what: str, value: Any) -> str:
        if isinstance(value, Decimal):  # of Parquet
            value = float(value)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            raise DatasetError(f"{what} has no label")
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # of a column where another label is missing
        if not isinstance(value, str | int):
            shown = show(str(value))
            other = f"`train score` learns other numbers; {SKIP_HINT}"
            raise DatasetError(
                f"{what} is no label, which is a text or a whole number: {shown}",
                hint=other if isinstance(value, float) else None,
            )
        self._kind = self._kind or type(value)
        if type(value) is not self._kind and not self._is_number(value):
            names = {str: "a text", int: "a number", bool: "true or false"}
            raise DatasetError(
                f"{what} is {names.get(type(value))}: {value!r}; in other rows it is {names.get(self._kind)}"
            )
        return require_text(str(value), what).strip()

    def _is_number(self, value: str | int) -> bool:
        """Return whether a label is the same number as a text and without quotes, as CSV files have it."""
        is_number = bool not in (type(value), self._kind)
        return is_number and str(value).strip().removeprefix("-").isdecimal()

    def read(self, note: Callable[[str], None]) -> Data:
        data = super().read(note)
        counts = Counter(label for record in data.train for label in record.labels)
        numbers = sorted(filter(str.isdecimal, counts), key=lambda label: (int(label), label))
        self.classes = numbers + sorted(counts.keys() - {*numbers})
        if len(self.classes) < 2:
            only = f"only the label {show(self.classes[0])}" if self.classes else "no labels"
            raise DatasetError(f"{data.train_source}: has {only}, and classification needs two")
        require_known(data, "label", counts)
        most = counts.most_common(MOST_COUNTS_SHOWN)
        shown = [f"{show(label)} {count}" for label, count in most]
        more = ["…"] * (len(counts) > len(shown))
        several = ", several per text" if self._several else ""
        if self._several and (self.options.class_weights or self.options.label_smoothing):
            raise DatasetError(
                "--class-weights and --label-smoothing need texts with one label each"
            )
        wrong, right = ("accuracy", "exact_match")[:: 1 if self._several else -1]
        if self.options.metric == wrong:
            raise DatasetError(
                f"--metric {wrong}: {data.train_source} has {'several labels' if several else 'one label'} "
                "per text",
                hint=f"use --metric {right}",
            )
        self._weigh(data)
        note(f"{len(self.classes)} classes{several}: {', '.join([*shown, *more])}")
        return data

    def load(self, context: TrainContext, data: Data) -> Loaded:
        from ..training.model import class_settings, classes_of

        kind = "multi_label_classification" if self._several else "single_label_classification"
        settings = {**class_settings(self.classes), "problem_type": kind}
        texts = (text for record in data.train for text in record.texts)
        loaded = load_student(self.options, HEAD, texts, context.ranks, settings)
        self.classes = classes_of(loaded)
        self._weigh(data)
        return loaded

    def prepare(
        self, context: TrainContext, loaded: Loaded, records: Sequence[Labeled]
    ) -> TextSamples:
        import numpy as np

        numbers = {name: number for number, name in enumerate(self.classes)}
        found = ([numbers[label] for label in each.labels] for each in records)
        targets: Any = list(found) if self._several else np.array([one for (one,) in found])
        return self.encode_samples(context, loaded, text_columns(records), targets)

    def collate(self, samples: Sequence[TextSample], loaded: Loaded) -> dict[str, Tensor]:
        import torch

        from ..training.batches import pad_inputs

        if self._several:
            labels = torch.zeros(len(samples), len(self.classes))
            for row, sample in enumerate(samples):
                labels[row, sample.target] = 1.0
        else:
            labels = torch.tensor([sample.target for sample in samples])
        return {**pad_inputs(samples, loaded.pad_token), "labels": labels}

    def weights(self, samples: Any) -> np.ndarray[Any, Any] | None:
        import numpy as np

        return None if self._weights is None else np.array(self._weights)[samples.targets]

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        import torch
        from torch.nn.functional import binary_cross_entropy_with_logits

        from ..training.losses import distill_loss, mean_loss

        smoothing, alpha = self.options.label_smoothing, self.options.distill_alpha
        teacher, labels = batch.get("teacher"), batch["labels"]
        if self._weights is None and not smoothing and teacher is None:
            return super().loss(model, batch)
        inputs = {name: each for name, each in batch.items() if name not in ("labels", "teacher")}
        logits = model(**inputs).logits
        if self._several:
            own = binary_cross_entropy_with_logits(logits.float(), labels)
        else:
            own = mean_loss(logits, labels, self._weights, smoothing)
        if teacher is None:
            return own
        weights = None if self._weights is None else torch.tensor(self._weights)[labels]
        heat = self.options.distill_temperature
        learned = distill_loss(logits, teacher, heat, weights, several=bool(self._several))
        return alpha * own + (1 - alpha) * learned

    @property
    def width(self) -> int:
        return len(self.classes)

    def pick_outputs(self, row: Any, record: Labeled) -> Sequence[Any]:
        found = row.get("scores") or row
        return [found[name] for name in self.classes]

    def compute_outputs(self, context: TrainContext, teacher: Loaded, samples: Any) -> Any:
        from ..training.model import classes_of, own_order

        order = own_order(teacher.model.config.id2label, self.classes)
        if not order:
            shown = shorten(", ".join(classes_of(teacher)), 80)
            raise ModelError(f"--teacher {self.options.teacher}: has other classes: {shown}")
        logits = super().compute_outputs(context, teacher, samples)
        return logits[:, [order.index(name) for name in self.classes]]

    def evaluate(
        self,
        context: TrainContext,
        loaded: Loaded,
        records: Sequence[Labeled],
        samples: TextSamples,
    ) -> dict[str, Any]:
        import numpy as np

        from ..training.evaluation import compute_logits

        logits = compute_logits(context.ranks, loaded, samples, context.autocast())
        if not context.ranks.first:
            return {}
        predicted = logits > 0 if self._several else logits.argmax(axis=1)
        chosen = [np.flatnonzero(each) if self._several else [each] for each in predicted]
        rows = [
            {
                "labels": list(record.labels),
                "predicted": [self.classes[int(each)] for each in found],
            }
            for record, found in zip(records, chosen, strict=True)
        ]
        return {"predictions": rows, **self._score(samples, predicted)}

    def _score(self, samples: TextSamples, predicted: Any) -> dict[str, Any]:
        import numpy as np
        from sklearn.metrics import accuracy_score, confusion_matrix, f1_score

        truth: Any = np.array(samples.targets) if not self._several else np.zeros_like(predicted)
        if self._several:
            for row, labels in enumerate(samples.targets):
                truth[row, labels] = True
        accuracy = 100 * float(accuracy_score(truth, predicted))
        labels = None
        if self._several and (known := truth.any(axis=0) | predicted.any(axis=0)).any():
            # As with one label, a class that the data lack does not count.
            labels = np.flatnonzero(known)
        counts = {"labels": labels, "average": "macro", "zero_division": 0}
        macro = 100 * float(f1_score(truth, predicted, **counts))
        scores: dict[str, Any] = {
            "exact_match" if self._several else "accuracy": round(accuracy, 3),
            "macro_f1": round(macro, 3),
            "classes": self.classes,
        }
        if not self._several and len(self.classes) <= MOST_CLASSES_SHOWN:
            matrix = confusion_matrix(truth, predicted, labels=range(len(self.classes)))
            scores["confusion"] = matrix.tolist()
        return scores

    @classmethod
    def has_trained(cls, folder: Path, architectures: Sequence[str]) -> bool:
        return super().has_trained(folder, architectures) and not has_one_output(folder)

    @classmethod
    def predict(cls, loaded: Loaded, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return the labels of each row's ``text`` (and ``pair``) with their probabilities."""
        from ..training.evaluation import run_texts

        names, several = loaded.model.config.id2label, loaded.has_several_labels

        def read(_: object, output: Any) -> Iterator[dict[str, Any]]:
            logits = output.logits.float()
            for scores in logits.sigmoid() if several else logits.softmax(dim=-1):
                chosen = (scores > 0.5).nonzero()[:, 0] if several else scores.argmax()[None]
                labels = {names[each]: round(float(scores[each]), 4) for each in chosen.tolist()}
                yield {"labels": labels}

        return run_texts(loaded, [texts_of(row) for row in rows], read)


def texts_of(row: Row) -> list[str]:
    """Return the text to predict for, and the second one of a pair."""
    values = row.values if isinstance(row.values, dict) else {}
    return [row.text(each).strip() for each in ("text", *(["pair"] if "pair" in values else []))]


def has_one_output(folder: Path) -> bool:
    """Return whether a model's head gives a number instead of classes, by its configuration."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return len(config.get("id2label") or (0, 1)) == 1
