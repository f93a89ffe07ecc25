"""Question answering on SQuAD's layout: the model marks an answer's first and last token in a passage.

The metrics, exact match and overlap of words (F1), are those of the evaluation script of v1.1:
https://rajpurkar.github.io/SQuAD-explorer/.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...data.records import skip_note
from ...runtime.errors import DatasetError
from ...training.options import SMALL, Range, TextOptions, is_url, option
from ...training.task import Data, Loaded
from ...training.text_task import Row, TextTask
from .dataset import Question, all_texts, load_hub_dataset, read_dataset, require_short_questions

if TYPE_CHECKING:
    from torch import Tensor

    from ...training.state import TrainContext
    from .features import Feature, Features


HEAD = "QuestionAnswering"
SAMPLE = Path(__file__).with_name("sample.json")
"""The demo's data: about a hundred questions on this project's subject, in SQuAD's layout."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


@dataclass(frozen=True)
class SquadOptions(TextOptions):
    """One training run. A sample is one feature, see :mod:`.features`."""

    task = "squad"

    data: str | None = option(
        None, "training data, a SQuAD v1.1 JSON file (default: --dataset's)", metavar="PATH"
    )
    dataset: str = option("squad", "dataset on the hub, if there is no --data", metavar="NAME")
    stride: int = option(128, "tokens shared by two features of a passage", within=Range(0, 4096))

    def __post_init__(self) -> None:
        super().__post_init__()
        if 2 * self.stride > self.max_length:
            raise ValueError(
                f"--stride {self.stride} is out of range: at most half of --max-length "
                f"({self.max_length}), or features would hardly advance"
            )
        if self.data is not None and self.dataset != "squad":
            raise ValueError("--data and --dataset can't be used together")


DEMO = SquadOptions(data=str(SAMPLE), **SMALL)


class Squad(TextTask[SquadOptions]):
    """``em`` and ``f1`` in the results are percentages; a sample is one feature (token window)."""

    name = "squad"
    Options = SquadOptions
    demo = DEMO
    head = HEAD
    inputs = ("question", "context")
    help = "fine-tune DistilBERT, or another encoder, on SQuAD or your data"

    def download(self) -> None:
        super().download()
        if self.options.data is None:
            load_hub_dataset(self.options.dataset, [] if self.options.skip_bad_records else None)

    def check(self) -> None:
        options = self.options
        local = (path for path in (options.data, options.eval) if path and not is_url(path))
        for path in local:
            questions = read_dataset(path, [] if options.skip_bad_records else None)
            if not options.skip_bad_records:
                require_short_questions(path, questions, options.max_length)

    def read(self, note: Callable[[str], None]) -> Data:
        options, skipped = self.options, list[DatasetError]()
        bad = skipped if options.skip_bad_records else None
        if options.data is None:
            train, unseen = load_hub_dataset(options.dataset, bad)
            source, eval_source = (f"{options.dataset} ({x})" for x in ("train", "validation"))
        else:
            train = unseen = read_dataset(options.data, bad)
            source = eval_source = options.data
        if options.eval is not None:
            unseen, eval_source = read_dataset(options.eval, bad), options.eval
        if skipped:
            note(skip_note(skipped))
        return Data(train, source, unseen, eval_source)

    def load(self, context: TrainContext, data: Data) -> Loaded:
        from ...training.model import load_model

        return load_model(self.options, HEAD, all_texts(data.train), context.ranks)

    def prepare(
        self, context: TrainContext, loaded: Loaded, records: Sequence[Question]
    ) -> Features:
        from .features import Encoded, collect_texts, cut_windows

        options = self.options
        texts = collect_texts(records)
        tokens = self.encode(context, loaded, texts.columns)
        skipped: list[DatasetError] | None = [] if options.skip_bad_records else None
        size = options.max_length, options.stride
        features = cut_windows(records, texts, Encoded(*tokens), loaded.tokenizer, size, skipped)
        if skipped:
            context.events.note(skip_note(skipped))
        return features

    def collate(self, samples: Sequence[Feature], loaded: Loaded) -> dict[str, Tensor]:
        import torch

        from ...training.batches import pad_inputs

        return {
            **pad_inputs(samples, loaded.pad_token),
            "start_positions": torch.tensor([feature.start for feature in samples]),
            "end_positions": torch.tensor([feature.end for feature in samples]),
        }

    def evaluate(
        self, context: TrainContext, loaded: Loaded, records: Sequence[Question], samples: Features
    ) -> dict[str, Any]:
        from ...runtime.output import save_json
        from .answers import predict
        from .task import score

        predictions = predict(context, loaded, records, samples)
        if context.ranks.first:
            save_json(context.output / "predictions.json", predictions)
        found = score(records, predictions)._asdict()
        return {name: round(percentage, 3) for name, percentage in found.items()}

    @classmethod
    def predict(cls, loaded: Loaded, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Answer the ``question`` of each row from its ``context``."""
        from .answers import ask, parse_question

        for place, values in rows:
            if isinstance(values, dict) and "context" not in values:
                raise DatasetError(
                    f"{place}: a model of `train squad` answers questions about a context",
                    hint="`spr-cluster predict` takes it as --context",
                )
        return [each._asdict() for each in ask(loaded, [parse_question(*row) for row in rows])]


class Scores(NamedTuple):
    """Percentages: answers that match exactly, and the mean overlap of words."""

    em: float
    f1: float


def normalize(text: str) -> str:
    """Return a text in lower case, without punctuation, articles, and extra spaces."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(prediction: str, truth: str) -> float:
    """Return 1.0 if both are equal after normalization, else 0.0."""
    return float(normalize(prediction) == normalize(truth))


def f1(prediction: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall over words, 0.0 to 1.0."""
    said, true = normalize(prediction).split(), normalize(truth).split()
    common = (Counter(said) & Counter(true)).total()
    if not common:
        return 0.0
    # In the official script's order of operations, for bitwise equal results.
    precision, recall = common / len(said), common / len(true)
    return (2 * precision * recall) / (precision + recall)


def score(questions: Sequence[Question], predictions: Mapping[str, str]) -> Scores:
    """Return the best match with any accepted answer, averaged over the questions.

    A question without a prediction counts as wrong, as in the official script.
    """

    def mean(measure: Callable[[str, str], float]) -> float:
        best = [
            max(measure(predictions[question.id], answer.text) for answer in question.answers)
            for question in questions
            if question.id in predictions
        ]
        return 100 * sum(best) / len(questions)

    return Scores(mean(exact_match), mean(f1))
