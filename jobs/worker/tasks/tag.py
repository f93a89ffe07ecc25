"""Tag the words of texts, for example to find names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..data.records import require_text, show
from ..runtime.errors import DatasetError
from ..training.options import SMALL, EncoderOptions
from ..training.task import Data, Loaded
from ..training.text_task import Row, TableOptions, TableTask, require_known

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ..data.tokens import Longs, TextSample, TextSamples
    from ..training.state import TrainContext

UNLABELED = -100
"""The label that has no part in the loss: of special tokens and of a word's tokens after its first."""
OUTSIDE = "O"
_MARKS = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S", "M": "I", "W": "S"}
"""Marks of entities' words by the names that schemes have for them: begin, inside, end, and single."""


@dataclass(frozen=True)
class TagOptions(TableOptions, EncoderOptions):
    """One training run of a tagger. A text is a row of words."""

    task = "tag"
    metrics: ClassVar[Mapping[str, str]] = {"f1": "max", "accuracy": "max"}
    epochs: int = TableOptions.redefine("epochs", 3)
    max_length: int = TableOptions.redefine("max_length", 256)


class Sentence(NamedTuple):
    """A row: words, and a tag for each."""

    words: list[str]
    labels: list[str]
    place: str

    @property
    def text(self) -> str:
        return " ".join(self.words)


class Tag(TableTask[TagOptions]):
    """``f1`` in the results is that of entities (tags such as B-PER and I-PER), ``accuracy`` that of words;
    both are percentages. Words beyond ``max_length`` count as outside of entities."""

    name = "tag"
    Options = TagOptions
    demo = TagOptions(data=str(Path(__file__).with_name("tag.sample.conll")), **SMALL)
    help = "tag words: names, parts of speech"
    scores: ClassVar[Mapping[str, str]] = {"f1": "F1"}
    pipeline_tag = "token-classification"
    head = "TokenClassification"
    adds = ("words", "tags")
    text_columns = ("words", "tokens")
    label_columns = ("tags", "ner_tags", "labels", "pos_tags")

    def convert(self, place: str, row: Any, text: str, label: str) -> Sentence:
        words, tags = (
            self._list(f"{place}: column {column!r}", row.get(column)) for column in (text, label)
        )
        if len(words) != len(tags):
            raise DatasetError(f"{place}: has {len(words)} words and {len(tags)} tags")
        return Sentence(words, tags, place)

    @staticmethod
    def _list(what: str, found: Any) -> list[str]:
        if not isinstance(found, list):
            raise DatasetError(
                f"{what} is not a list", hint="tag reads CoNLL files, and JSON with lists"
            )
        if not found:
            raise DatasetError(f"{what} is empty")
        texts = (str(each) if isinstance(each, int) else each for each in found)
        return [require_text(x, f"{what}, word {n}").strip() for n, x in enumerate(texts, start=1)]

    def read(self, note: Callable[[str], None]) -> Data:
        data = super().read(note)
        self.classes = sorted({tag for record in data.train for tag in record.labels})
        if len(self.classes) < 2:
            raise DatasetError(f"{data.train_source}: has only the tag {show(self.classes[0])}")
        require_known(data, "tag", self.classes)
        rows, bare = (record.labels for record in data.eval), are_bare(self.classes)
        if self.options.metric == "f1" and not any(find_entities(row, bare=bare) for row in rows):
            raise DatasetError(
                f"--metric f1: {data.eval_source} has no tags of entities, such as B-PER",
                hint="use --metric accuracy",
            )
        self._weigh(data)
        return data

    def load(self, context: TrainContext, data: Data) -> Loaded:
        from ..training.model import class_settings, classes_of, load_model

        texts = (record.text for record in data.train)
        settings = class_settings(self.classes)
        loaded = load_model(self.options, self.head, texts, context.ranks, settings)
        # Saved with the tokenizer, so that `predict` cuts texts as training did.
        loaded.tokenizer.model_max_length = self.options.max_length
        self.classes = classes_of(loaded)
        self._weigh(data)
        return loaded

    def prepare(
        self, context: TrainContext, loaded: Loaded, records: Sequence[Sentence]
    ) -> TextSamples:
        import numpy as np

        samples = self.encode_samples(
            context, loaded, [[record.text for record in records]], records, offsets=True
        )
        numbers = {name: number for number, name in enumerate(self.classes)}
        (tokens,) = samples.columns
        targets = []
        for record, (begin, end) in zip(records, pairwise(tokens.bounds), strict=True):
            ends = tokens.offsets[begin:end, 1]
            word = words_of(record.words, ends)
            first = np.diff(word, prepend=-1) > 0
            tags = np.array([numbers[tag] for tag in record.labels])
            targets.append(np.where(first, tags[word], UNLABELED))
        found = replace(samples, targets=targets)
        if not self.weights(found).any():
            raise DatasetError(f"{records[0].place}: has no words that the tokenizer knows")
        return found

    def weights(self, samples: Any) -> np.ndarray[Any, Any]:
        import numpy as np

        every = (each[: samples.room] for each in samples.targets)
        known = [each[each != UNLABELED] for each in every]
        if self._weights is None:
            return np.array([len(each) for each in known])
        of_tag = np.array(self._weights)
        return np.array([of_tag[each].sum() for each in known])

    def collate(self, samples: Sequence[TextSample], loaded: Loaded) -> dict[str, Tensor]:
        import torch

        from ..training.batches import pad_inputs, padded_width

        labels = torch.full((len(samples), padded_width(samples)), UNLABELED)
        for row, sample in enumerate(samples):
            kept = torch.from_numpy(sample.target)
            labels[row, sample.front : sample.front + len(kept)] = kept
        return {**pad_inputs(samples, loaded.pad_token), "labels": labels}

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        from ..training.losses import mean_loss

        inputs = {name: each for name, each in batch.items() if name != "labels"}
        logits = model(**inputs).logits.flatten(0, 1)
        labels = batch["labels"].flatten()
        return mean_loss(logits, labels, self._weights, self.options.label_smoothing)

    def evaluate(
        self,
        context: TrainContext,
        loaded: Loaded,
        records: Sequence[Sentence],
        samples: TextSamples,
    ) -> dict[str, Any]:
        from ..training.evaluation import compute_together, run_batches

        def tag(batches: Sequence[Longs]) -> Iterator[tuple[Longs, np.ndarray[Any, Any]]]:
            for chosen, output in run_batches(loaded, samples, batches, context.autocast()):
                yield chosen, output.logits.argmax(dim=-1).numpy()

        parts = compute_together(context.ranks, samples.lengths, tag)
        if not context.ranks.first:
            return {}
        found: list[list[str]] = [[] for _ in records]
        for chosen, predicted in parts:
            for number, row in zip(chosen, predicted, strict=True):
                found[number] = self._words(records[number], samples, int(number), row)
        truth = [record.labels for record in records]
        return {"predictions": found, **score(truth, found, self.classes)}

    def _words(self, record: Sentence, samples: TextSamples, number: int, row: Any) -> list[str]:
        """Return a tag for each word; words without a token or beyond the model's input get "outside"."""
        (tokens,) = samples.columns
        begin, end = tokens.bounds[number : number + 2]
        ends = tokens.offsets[begin:end, 1][: samples.room]
        front = len(samples.template.prefix)
        return tag_words(record.words, ends, row[front : front + len(ends)], self.classes)

    @classmethod
    def predict(cls, loaded: Loaded, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Tag the words of each row: its ``words``, or its ``text`` split at spaces."""
        import numpy as np

        from ..training.evaluation import run_texts

        def read(tokens: dict[str, Any], output: Any) -> Iterator[tuple[Any, Any]]:
            best = output.logits.argmax(dim=-1).numpy()
            for ends, row in zip(tokens["offset_mapping"][:, :, 1].numpy(), best, strict=True):
                real = np.flatnonzero(ends)  # special tokens are not in the text
                yield ends[real], row[real]

        words, names = [_words_of(row) for row in rows], loaded.model.config.id2label
        found = run_texts(loaded, [[" ".join(each)] for each in words], read, offsets=True)
        return [
            {"words": own, "tags": tag_words(own, *each, names)}
            for own, each in zip(words, found, strict=True)
        ]


def words_of(words: Sequence[str], ends: Any) -> Any:
    """Return each token's word index, from its end in the joined words."""
    import numpy as np

    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    # A token's last character: its first may be the space before its word.
    return np.searchsorted(starts, ends - 1, side="right") - 1


def tag_words(words: Sequence[str], ends: Any, best: Any, names: Any) -> list[str]:
    """Return each word's tag: that of its first token, or "outside" without one.

    Tokens have ``ends`` in the joined words and the ``best`` of ``names``.
    """
    import numpy as np

    word, first = np.unique(words_of(words, ends), return_index=True)
    tags = dict(zip(word.tolist(), best[first].tolist(), strict=True))
    return [names[tags[n]] if n in tags else OUTSIDE for n in range(len(words))]


def _words_of(row: Row) -> list[str]:
    values = row.values if isinstance(row.values, dict) else {}
    if "words" in values:
        return Tag._list(f"{row.place}: 'words'", values["words"])
    return require_text(values.get("text"), f"{row.place}: 'text'").split()


def score(
    truth: Sequence[Sequence[str]], found: Sequence[Sequence[str]], tags: Collection[str]
) -> dict[str, Any]:
    """Return the accuracy of words and, for tags of entities, precision, recall, and F1, in percent.

    ``tags`` are all that the model has: whether these are entities' does not depend on what it finds.
    """
    from sklearn.metrics import accuracy_score

    true_words, words = ([tag for row in rows for tag in row] for rows in (truth, found))
    scores = {"accuracy": round(100 * float(accuracy_score(true_words, words)), 3)}
    bare = are_bare(tags)
    wanted, marked = (
        {
            (number, *span)
            for number, row in enumerate(rows)
            for span in find_entities(row, bare=bare)
        }
        for rows in (truth, found)
    )
    if wanted:
        right = len(wanted & marked)
        precision, recall = (right / max(len(each), 1) for each in (marked, wanted))
        f1 = 2 * right / (len(wanted) + len(marked))
        figures = {"f1": f1, "precision": precision, "recall": recall}
        scores |= {name: round(100 * value, 3) for name, value in figures.items()}
    return scores


def are_bare(tags: Collection[str]) -> bool:
    """Return whether tags such as B are those of entities without types, such as keyphrases and segments."""
    # S is no mark among parts of speech, nor among S, M, and L.
    return {*tags} <= {*_MARKS, OUTSIDE} and bool({*tags} & {OUTSIDE, "B", "I"})


def find_entities(tags: Sequence[str], *, bare: bool = False) -> list[tuple[str, int, int]]:
    """Return the entities in tags such as B-PER and I-PER: type, first word, and the word after the last.

    If marks may be ``bare``, one without a type, such as B, has the type "_".

    As in seqeval by default, which follows CoNLL's evaluation, for IOB, IOE, and IOBES, which is BILOU with
    other letters: an entity also begins at an I or E after another type, an end, or no entity.
    """
    found, begin, kind, closed = list[tuple[str, int, int]](), 0, "", False
    for place, tag in enumerate([*tags, OUTSIDE]):
        name, dash, own = tag.partition("-")
        mark = _MARKS.get(name, "") if dash or bare else ""
        inside = (own or "_") if mark else ""
        if kind and (closed or mark in ("B", "S") or inside != kind):
            found.append((kind, begin, place))
            kind = ""
        if inside and not kind:
            begin, kind = place, inside
        closed = mark in ("E", "S")
    return found
