"""Question answering on SQuAD's layout: the model marks an answer's first and last token in a passage.

Data with questions that have no answer (SQuAD v2.0) need no option. For those, the first token is marked, and
the model's configuration holds the threshold above which it gives no answer: see :mod:`.metrics`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...data.care import describe
from ...data.records import skip_note
from ...runtime.errors import DatasetError
from ...runtime.output import save_json
from ...training.options import SMALL, EncoderOptions, Range, is_url, option
from ...training.task import Data, Loaded
from ...training.text_task import Row, TextTask
from .dataset import Question, all_texts, load_hub_dataset, read_dataset
from .metrics import LONGEST_ANSWER, THRESHOLD, WINDOW, Answers, fit_threshold, score, score_v2

if TYPE_CHECKING:
    from torch import Tensor

    from ...training.state import TrainContext
    from .features import Feature, Features


HEAD = "QuestionAnswering"
_SHOWN = ("em", "f1", "has_answer_f1", "no_answer_f1")
"""Scores to display of those of v2.0."""
SAMPLE = Path(__file__).with_name("sample.json")
"""The demo's data: about a hundred questions on this project's subject, in SQuAD's layout."""


@dataclass(frozen=True)
class SquadOptions(EncoderOptions):
    """One training run. A sample is one feature, see :mod:`.features`."""

    task = "squad"
    metrics: ClassVar[Mapping[str, str]] = {"f1": "max", "em": "max"}

    data: str | None = option(
        None,
        "training data, a SQuAD JSON file, v1.1 or v2.0 (default: --dataset's)",
        metavar="PATH",
    )
    dataset: str = option("squad", "dataset on the hub, if there is no --data", metavar="NAME")
    stride: int = option(128, "tokens shared by two features of a passage", within=Range(0, 4096))
    max_answer_length: int = option(
        30, "tokens of the longest answer that the model gives", within=Range(1, 8192)
    )

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
    """Scores in the results are percentages; a sample is one feature (token window)."""

    name = "squad"
    Options = SquadOptions
    demo = DEMO
    shares = ("em",)
    pipeline_tag = "question-answering"
    head = HEAD
    inputs = ("question", "context")
    adds = ("answer", "score", "start", "null_odds")
    help = "fine-tune DistilBERT, or another encoder, on SQuAD or your data"
    scores: ClassVar[Mapping[str, str]] = {
        "f1": "F1",
        "em": "exact match",
        "has_answer_f1": "F1 with an answer",
        "no_answer_f1": "F1 without an answer",
    }

    def download(self) -> None:
        super().download()
        if self.options.data is None:
            load_hub_dataset(self.options.dataset, [] if self.options.skip_bad_records else None)

    def check(self) -> str:
        options = self.options
        bad: list[DatasetError] | None = [] if options.skip_bad_records else None
        paths = dict.fromkeys(x for x in (options.data, options.eval) if x and not is_url(x))
        train, *unseen = [read_dataset(path, bad) for path in paths] or [[]]
        if options.data is not None:
            self.check_data(Data((), options.data, (), options.eval or options.data))
        return describe(train, unseen[0]) if unseen else ""

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

        loaded = load_model(self.options, HEAD, all_texts(data.train), context.ranks)
        # A model may come from another training.
        vars(loaded.model.config).pop(THRESHOLD, None)
        setattr(loaded.model.config, LONGEST_ANSWER, self.options.max_answer_length)
        setattr(loaded.model.config, WINDOW, [self.options.max_length, self.options.stride])
        if not all(question.answers for part in (data.train, data.eval) for question in part):
            setattr(loaded.model.config, THRESHOLD, 0.0)
        return loaded

    def prepare(
        self, context: TrainContext, loaded: Loaded, records: Sequence[Question]
    ) -> Features:
        from .features import build_features

        options = self.options
        skipped: list[DatasetError] | None = [] if options.skip_bad_records else None
        size, tokenize = (options.max_length, options.stride), partial(self.encode, context, loaded)
        features = build_features(records, loaded.tokenizer, *size, skipped, tokenize)
        if skipped:
            context.events.note(skip_note(skipped))
        found, longest = features.windows, options.max_answer_length
        if too_long := len({*found.question[found.end - found.start >= longest].tolist()}):
            text = (
                f"{too_long} of {len(records)} questions have answers of more than {longest} tokens"
            )
            context.events.note(f"{text}, which the model can't give; raise --max-answer-length")
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
        from .answers import predict

        answers = predict(context, loaded, records, samples)
        if hasattr(loaded.model.config, THRESHOLD):
            return _evaluate_v2(context, loaded, records, answers)
        scores = score(records, answers.texts)._asdict()
        found = {name: round(percentage, 3) for name, percentage in scores.items()}
        return {"predictions": answers.texts, **found}

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
        found = ask(loaded, [parse_question(*row) for row in rows])
        return [
            {name: value for name, value in each._asdict().items() if value is not None}
            for each in found
        ]


def _evaluate_v2(
    context: TrainContext, loaded: Loaded, records: Sequence[Question], raw: Answers
) -> dict[str, Any]:
    """Fit the threshold, save it with the model, and score the answers with it.

    An exported form has that of the trained model, which `predict` uses for both.
    """
    from ...training.export import Compiled

    known = getattr(loaded.model.config, THRESHOLD)
    is_form = isinstance(loaded.model, Compiled)
    threshold = known if is_form else fit_threshold(records, raw)
    answers = raw.with_threshold(threshold)
    setattr(loaded.model.config, THRESHOLD, threshold)
    path = context.output / "model" / "config.json"
    if context.ranks.first and path.exists():  # not while training
        config = json.loads(path.read_text(encoding="utf-8"))
        save_json(path, {**config, THRESHOLD: threshold})
    found: dict[str, Any] = {
        name: value if name.endswith(("total", "threshold")) else round(value, 3)
        for name, value in score_v2(records, answers, threshold).items()
    }
    if all(each.answers for each in records):
        text = "every question for evaluation has an answer: the threshold for no answer is 0"
    else:
        before = score_v2(records, raw.with_threshold(0.0), 0.0)["f1"]
        text = (
            f"threshold for no answer, fitted on the evaluation data: {threshold:.3f}; F1 is "
            f"{found['f1']:.1f}, with threshold 0 {before:.1f}"
        )
    context.events.note(text)
    shown = {name: found[name] for name in _SHOWN if name in found}
    files = {"predictions": answers.texts, "null_odds": answers.null_odds}
    return {**files, **found, THRESHOLD: threshold, "scores": shown}
