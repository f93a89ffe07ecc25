"""Score texts or pairs of texts: a number for each row, or an order of the passages for a query."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..data.groups import (
    POSITIVE_COLUMNS,
    FlatTexts,
    Grouped,
    choose_group_columns,
    flatten,
    read_groups,
)
from ..data.records import require_text, show
from ..data.table import Table, choose_column
from ..runtime.errors import DatasetError, ModelError
from ..training.options import SMALL, option
from ..training.task import Data, Loaded
from ..training.teacher import TaughtTask, TeacherOptions, load_student
from ..training.text_task import Row, RowOptions, text_columns
from .classify import HEAD, has_one_output, texts_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..data.tokens import TextSamples
    from ..training.state import TrainContext

RANKING = "ranking"
_RANKED = {"mrr": "max", "ndcg_at_10": "max"}


@dataclass(frozen=True)
class ScoreOptions(TeacherOptions):
    """One training run of a model with one output. Raises ``ValueError`` for the other objective's metric."""

    task = "score"
    metrics: ClassVar[Mapping[str, str]] = {
        "spearman": "max",
        "pearson": "max",
        "mse": "min",
        **_RANKED,
    }
    objective: str = option(
        "regression",
        "learn each row's number, or to rank a query's positive before its negatives (a reranker)",
        choices=("regression", RANKING),
    )
    pair_column: str | None = option(
        None, "column with the second text of pairs, or the positive", metavar="NAME"
    )
    label_column: str | None = option(None, "column with the numbers", metavar="NAME")
    negative_column: str | None = option(
        None, "column with a text, or a list of texts, to rank below the positive", metavar="NAME"
    )
    epochs: int = RowOptions.redefine("epochs", 3)
    max_length: int = RowOptions.redefine("max_length", 256)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_ranking = self.objective == RANKING
        if is_ranking and self.label_column:
            raise ValueError(f"--label-column: --objective {RANKING} has no labels")
        if self.negative_column and not is_ranking:
            raise ValueError(f"--negative-column has an effect only with --objective {RANKING}")
        if self.metric and (self.metric in _RANKED) != (self.objective == RANKING):
            raise ValueError(f"--metric {self.metric}: not with --objective {self.objective}")


class Scored(NamedTuple):
    """A row: one text or two, and its number."""

    texts: tuple[str, ...]
    score: float


class Score(TaughtTask[ScoreOptions]):
    """``pearson`` and ``spearman`` in the results are percentages, as are ``mrr`` and ``ndcg_at_10``."""

    name = "score"
    Options = ScoreOptions
    demo = ScoreOptions(data=str(Path(__file__).with_name("score.sample.csv")), **SMALL)
    help = "a number for each text or pair, or a reranker of passages"
    scores: ClassVar[Mapping[str, str]] = {"mse": "mean squared error", "ndcg_at_10": "NDCG@10"}
    plain_scores: ClassVar[Mapping[str, str]] = {"mse": ".3g"}
    head = HEAD
    takes_pair = True
    adds = ("score",)
    pipeline_tag = "text-ranking"
    other_columns = "others"
    text_columns = (
        *("query", "question", "anchor", "text", "sentence", "sentence1", "premise"),
        *("review", "content", "description"),
    )
    pair_columns = ("sentence2", "text2", "hypothesis", *POSITIVE_COLUMNS)
    label_columns = ("score", "label", "rating", "similarity", "stars", "value", "target")

    @property
    def is_ranking(self) -> bool:
        """Whether the rows are queries with their positives and negatives."""
        return self.options.objective == RANKING

    def choose_columns(self, table: Table) -> list[str]:
        asked = self.options.pair_column
        if self.is_ranking:
            columns = choose_group_columns(table, self.options, self.text_columns)
            if len(columns) == 2:
                raise DatasetError(
                    f"{table.source}: --objective ranking needs negatives, and there are none",
                    hint="name their column negative, or with --negative-column",
                )
            return columns
        text, label = super().choose_columns(table)
        others = {each.strip() for each in table.columns} - {text.strip(), label.strip()}
        known = [each for each in self.pair_columns if each in others]
        has_pair = asked is not None or known
        return [text, label, *([choose_column(table, asked, known, "")] if has_pair else [])]

    def input_columns(self, table: Table) -> dict[str, str]:
        text, *others = self.choose_columns(table)
        pair = others[:1] if self.is_ranking else others[1:]
        return {"text": text, **({"pair": pair[0]} if pair else {})}

    def convert(self, place: str, row: Any, *columns: str) -> Any:
        if self.is_ranking:
            groups = read_groups(place, row, *columns)
            if len(groups[0].texts) == 2:
                raise DatasetError(f"{place}: column {columns[2]!r} has no text to rank lower")
            return groups
        text, label, *pair = columns
        texts = (
            require_text(row.get(each), f"{place}: column {each!r}").strip()
            for each in (text, *pair)
        )
        return Scored(tuple(texts), _number(f"{place}: column {label!r}", row.get(label)))

    def _records(self, table: Table, *others: Any) -> Sequence[Any]:
        # Their numbers are learned, and -1 is none.
        numbers: Any = {name: range(len(each)) for name, each in table.classes.items()}
        records = super()._records(table._replace(classes=numbers), *others)
        return flatten(records) if self.is_ranking else records

    def open_teacher(self, context: TrainContext | None = None) -> Loaded:
        loaded = super().open_teacher(context)
        if (count := loaded.model.config.num_labels) != 1:
            raise ModelError(
                f"--teacher {self.options.teacher}: has {count} outputs, and a score is one",
                hint="a model of `train classify` teaches `train classify`",
            )
        return loaded

    def load(self, context: TrainContext, data: Data) -> Loaded:
        settings = {"num_labels": 1, "problem_type": "regression"}
        texts = (text for record in data.train for text in record.texts)
        loaded = load_student(self.options, HEAD, texts, context.ranks, settings)
        # CrossEncoder of sentence-transformers would apply a sigmoid.
        loaded.model.config.sentence_transformers = {
            "activation_fn": "torch.nn.modules.linear.Identity"
        }
        loaded.model.config.objective = self.options.objective
        return loaded

    def prepare(
        self, context: TrainContext, loaded: Loaded, records: Sequence[Any]
    ) -> TextSamples | Grouped:
        import numpy as np

        if not self.is_ranking:
            scores = [each.score for each in records]
            return self.encode_samples(context, loaded, text_columns(records), scores)
        texts = FlatTexts(records, lambda each: each.texts[1:])
        queries = FlatTexts(records, lambda each: each.texts[:1] * (len(each.texts) - 1))
        pairs = self.encode_samples(context, loaded, [queries, texts], texts.owners)
        numbers = np.arange(len(texts))
        return Grouped(pairs, np.array(texts.bounds), numbers, numbers, numbers)

    def collate(self, samples: Sequence[Any], loaded: Loaded) -> dict[str, Tensor]:
        import torch

        from ..training.batches import pad_inputs

        if not self.is_ranking:
            scores = torch.tensor([sample.target for sample in samples])
            return {**pad_inputs(samples, loaded.pad_token), "labels": scores}
        flat = pad_inputs([pair for sample in samples for pair in sample.parts], loaded.pad_token)
        counts = torch.tensor([len(sample.parts) for sample in samples])
        has = torch.arange(int(counts.max())) < counts[:, None]
        batch = {name: each.new_zeros(*has.shape, each.shape[1]) for name, each in flat.items()}
        for name, each in flat.items():
            batch[name][has] = each
        return batch

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        import torch
        from torch.nn.functional import cross_entropy, mse_loss

        inputs = {name: each for name, each in batch.items() if name not in ("labels", "teacher")}
        # A group's pairs are a dimension more.
        has = batch["attention_mask"].any(dim=-1)
        found = model(**{name: each[has] for name, each in inputs.items()}).logits[:, 0].float()
        if self.is_ranking:
            scores = found.new_full(has.shape, float("-inf")).masked_scatter(has, found)
            loss = cross_entropy(scores, torch.zeros(len(has), dtype=torch.int64))
        else:
            loss = mse_loss(found, batch["labels"])
        if "teacher" not in batch:
            return loss
        away = (found - batch["teacher"][..., 0][has]) ** 2
        rows = torch.zeros(has.shape).masked_scatter(has, away)
        alpha = self.options.distill_alpha
        each = rows.sum(-1) / has.sum(-1) if self.is_ranking else rows
        return alpha * loss + (1 - alpha) * each.mean()

    def pick_outputs(self, row: Any, record: Any) -> Sequence[Any]:
        value = row.get("scores", row.get("predicted_score", row.get("score")))
        found = value if isinstance(value, list) else [value]
        if self.is_ranking and len(found) != len(record.texts) - 1:
            raise ValueError(f"{len(found)} for {len(record.texts) - 1} texts")
        return found

    def compute_outputs(self, context: TrainContext, teacher: Loaded, samples: Any) -> Any:
        pairs = samples.parts if self.is_ranking else samples
        return super().compute_outputs(context, teacher, pairs)

    def evaluate(
        self, context: TrainContext, loaded: Loaded, records: Sequence[Any], samples: Any
    ) -> dict[str, Any]:
        from ..training.scores import score_numbers, score_rankings

        found = self.compute_outputs(context, loaded, samples)[:, 0]
        if not context.ranks.first:
            return {}
        figures, rows = (score_rankings if self.is_ranking else score_numbers)(records, found)
        return {"predictions": rows, **figures}

    @classmethod
    def has_trained(cls, folder: Path, architectures: Sequence[str]) -> bool:
        return super().has_trained(folder, architectures) and has_one_output(folder)

    @classmethod
    def predict(cls, loaded: Loaded, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return the number for each row's ``text`` (and ``pair``)."""
        from ..training.evaluation import run_texts

        texts = [texts_of(row) for row in rows]
        found = run_texts(loaded, texts, lambda _, output: output.logits[:, 0].tolist())
        return [{"score": each} for each in found]


def is_ranking(loaded: Loaded) -> bool:
    """Return whether a trained model's numbers have no scale, by its configuration."""
    return getattr(getattr(loaded.model, "config", None), "objective", "") == RANKING


def _number(what: str, value: Any) -> float:
    try:
        found = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise DatasetError(f"{what} is not a number: {show(str(value))}")
    return found
