"""Question answering on SQuAD's layout: the model marks an answer's first and last token in a passage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...data.records import skip_note
from ...runtime.errors import DatasetError
from ...training.task import Data, Loaded
from ...training.text_task import Row, TextTask
from .dataset import Question, all_texts, load_hub_dataset, read_dataset, require_short_questions
from .options import DEMO, SquadOptions

if TYPE_CHECKING:
    from torch import Tensor

    from ...training.state import TrainContext
    from .features import Feature, Features

HEAD = "QuestionAnswering"


class Squad(TextTask[SquadOptions]):
    """``em`` and ``f1`` in the results are percentages; a sample is one feature (token window)."""

    name = "squad"
    Options = SquadOptions
    demo = DEMO
    head = HEAD
    help = "fine-tune DistilBERT, or another encoder, on SQuAD or your data"

    def download(self) -> None:
        super().download()
        if self.options.data is None:
            load_hub_dataset(self.options.dataset, [] if self.options.skip_bad_records else None)

    def check(self) -> None:
        options = self.options
        for path in filter(None, (options.data, options.eval)):
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
        from .scoring import score

        predictions = predict(context, loaded, records, samples)
        scores = score(records, predictions)
        if context.ranks.first:
            save_json(context.output / "predictions.json", predictions)
        return {
            "em": round(scores.em, 3),
            "f1": round(scores.f1, 3),
        }

    @classmethod
    def predict(cls, loaded: Loaded, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Answer the ``question`` of each row from its ``context``."""
        from .answer import ask, parse_question

        for place, values in rows:
            if isinstance(values, dict) and "context" not in values:
                raise DatasetError(
                    f"{place}: a model of `train squad` answers questions about a context",
                    hint="`spr-cluster predict` takes it as --context",
                )
        return [each._asdict() for each in ask(loaded, [parse_question(*row) for row in rows])]
