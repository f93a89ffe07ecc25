"""Learn vectors of texts from pairs, such as questions and the passages that answer them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.groups import (
    POSITIVE_COLUMNS,
    QUERY_COLUMNS,
    FlatTexts,
    Group,
    Grouped,
    choose_group_columns,
    flatten,
    read_groups,
)
from ...data.readers import read_table
from ...data.records import require_single, require_text, skip_note
from ...data.table import Table, choose_column, read_records
from ...runtime.errors import DatasetError, ModelError
from ...training.options import NO_CACHE, SCRATCH, SMALL
from ...training.task import Data, Loaded
from ...training.teacher import TaughtTask, load_student
from ...training.text_task import Row
from .options import EmbedOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from ...data.groups import GroupSample
    from ...runtime.ranks import Ranks
    from ...training.state import TrainContext
    from .evaluation import Corpus


_SIMILARITIES = {"score", "label", "similarity", "is_duplicate"}
"""Columns which may tell whether a row's texts belong together."""
_UNLIKE = (
    "false|no|neutral|contradiction|different|dissimilar|unrelated|irrelevant|(not|non)[ _-].+"
)


def _is_low(value: Any) -> bool:
    """Return whether a value is a number below 1, or a text such as ``not_equivalent``."""
    text = str(value).strip().lower()
    try:
        return float(text) < 1
    except ValueError:
        return bool(re.fullmatch(_UNLIKE, text))


def _plain(records: Sequence[Group]) -> FlatTexts:
    """Return all texts without prompts."""
    return FlatTexts(records, lambda each: each.texts)


class Embed(TaughtTask[EmbedOptions]):
    """``recall_at_1``, ``recall_at_10``, and ``mrr`` in the results are percentages.

    They tell how well the evaluation data's anchors find their positives among all of its positives and
    negatives.
    """

    name = "embed"
    shares = ("recall_at_1", "recall_at_10")
    pipeline_tag = "sentence-similarity"
    Options = EmbedOptions
    demo = EmbedOptions(
        data=str(Path(__file__).parents[1] / "classify.sample.jsonl"),
        text_column="text",
        pair_column="label",
        **SMALL,
    )
    help = "turn texts into vectors for search, learned from pairs or triplets"
    head = ""
    other_columns = "others"
    adds = ("embedding",)
    text_columns = QUERY_COLUMNS
    _ranks: Ranks
    _passages: Sequence[str] = ()
    _corpus: Corpus | None = None

    def choose_columns(self, table: Table) -> list[str]:
        return choose_group_columns(table, self.options, self.text_columns)

    def convert(self, place: str, row: Any, *columns: str) -> tuple[Group, ...]:
        name = columns[1].strip()
        if self.options.pair_column is None and not name.startswith("pos"):
            for rated in sorted(each for each in row if each.strip() in _SIMILARITIES):
                if _is_low(row[rated]):
                    raise DatasetError(
                        f"{place}: column {rated!r} is {row[rated]}, and every row is learned as similar",
                        hint=f"remove such rows, use `train score`, or learn all with --pair-column {name}",
                    )
        return read_groups(place, row, *columns)

    def _records(self, *table: Any) -> Sequence[Group]:
        return flatten(super()._records(*table))

    def read(self, note: Callable[[str], None]) -> Data:
        data = super().read(note)
        # Otherwise nothing could be learned, or everything found.
        first = data.train[0].texts[1]
        if all(group.texts[1] == first for group in data.train):
            raise DatasetError(f"{data.train_source}: all its pairs have the same second text")
        if self.options.corpus is not None:
            self._passages = self._read_corpus(self.options.corpus, note)
        return data

    @property
    def other_places(self) -> Sequence[str]:
        return () if self.options.corpus is None else (self.options.corpus,)

    def _read_corpus(self, place: str, note: Callable[[str], None]) -> Sequence[str]:
        cache = self.options.token_cache
        mapped = None if cache == NO_CACHE else Path(cache).expanduser()
        table, options = read_table(place, mapped=mapped), self.options
        known = (options.pair_column or "", *POSITIVE_COLUMNS, "text", "content")
        column = choose_column(table, None, known, "--pair-column")
        more = ", without their titles" if "title" in table.columns else ""
        note(f"{table.source}: passages from column {column!r}{more}")

        def convert(where: str, row: Any) -> str:
            require_single(row.get(column), where)
            return require_text(row.get(column), f"{where}: column {column!r}").strip()

        skipped = list[DatasetError]()
        found = read_records(table, convert, skipped if options.skip_bad_records else None)
        if skipped:
            note(skip_note(skipped))
        return found

    def load(self, context: TrainContext, data: Data) -> Loaded:
        self._ranks = context.ranks
        texts = (text for group in data.train for text in group.texts)
        loaded = load_student(self.options, self.head, texts, context.ranks)
        size, sizes = loaded.model.config.get_text_config().hidden_size, self.options.sizes
        if sizes and max(sizes) >= size:
            given = self.options.matryoshka
            raise ModelError(f"--matryoshka {given}: the vectors have {size} dimensions")
        wrapped = self._wrap(loaded, context)
        if self._passages:
            self._corpus = self._encode_corpus(context, wrapped)
        return wrapped

    def _encode_corpus(self, context: TrainContext, loaded: Loaded) -> Corpus:
        from ...data.mapped import Lazy
        from .evaluation import Corpus, digest_texts

        prompt = self.options.passage_prompt or ""
        texts = Lazy(self._passages, lambda _, text: prompt + text)
        samples = self.encode_samples(context, loaded, [texts], range(len(texts)))
        return Corpus(self._passages, samples, digest_texts(self._passages))

    def download(self) -> None:
        from .encoder import read_declared

        super().download()
        if self.options.model_name not in (None, SCRATCH):
            read_declared(str(self.options.model_name))

    def open_teacher(self, context: TrainContext | None = None) -> Loaded:
        return self._wrap(super().open_teacher(context), context)

    def _wrap(self, loaded: Loaded, context: TrainContext | None) -> Loaded:
        from .encoder import BiEncoder, read_declared

        options, declared = self.options, read_declared(loaded.model.name_or_path, context)
        named = {"query": options.query_prompt, "document": options.passage_prompt}
        prompts = {name: text for name, text in named.items() if text is not None}
        return loaded._replace(model=BiEncoder(loaded.model, options.max_length, prompts, declared))

    def prepare(self, context: TrainContext, loaded: Loaded, records: Sequence[Group]) -> Grouped:
        import numpy as np

        from .evaluation import digest_texts

        texts = self._texts(records)
        parts = self.encode_samples(context, loaded, [texts], texts.owners)
        # Ranks number equal texts equally.
        _, first, numbers = np.unique(digest_texts(texts), return_index=True, return_inverse=True)
        _, same = np.unique(digest_texts(_plain(records))[first], return_inverse=True)
        return Grouped(parts, np.array(texts.bounds), numbers, first, same)

    def _texts(self, records: Sequence[Group]) -> FlatTexts:
        query, passage = self.options.query_prompt or "", self.options.passage_prompt or ""

        def pick(group: Group) -> Sequence[str]:
            return [query + group.texts[0], *(passage + text for text in group.texts[1:])]

        return FlatTexts(records, pick)

    def finish(self, context: TrainContext, loaded: Loaded, samples: Grouped) -> Grouped:
        import numpy as np

        from ...data.token_cache import compute_once
        from ...training.teacher import digest_weights, settings_of
        from .negatives import add_negatives, mine

        count, note = self.options.mine_negatives, context.events.note
        if count is None:
            return samples

        def compute() -> NDArray[np.float32]:
            vectors = self.compute_outputs(context, loaded, samples)
            return mine(samples, vectors, count, context.ranks).astype(np.int32).view(np.float32)

        model, dtype = loaded.model, context.precision.dtype
        key = f"{digest_weights(model)} {settings_of(model)} {samples.digest()} {dtype} {count}"
        found = compute_once(context.ranks, self.open_cache(), key, compute, note).view(np.int32)
        note(f"negatives that the model found: {(found >= 0).sum() / len(samples):.1f} per anchor")
        return add_negatives(samples, found.astype(np.int64))

    def collate(self, samples: Sequence[GroupSample], loaded: Loaded) -> dict[str, Tensor]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        from ...training.batches import pad_inputs

        width = max(len(sample.parts) for sample in samples)
        columns = [
            pad_inputs(
                [each.parts[place] for each in samples if place < len(each.parts)], loaded.pad_token
            )
            for place in range(width)
        ]
        flat = {name: torch.cat([each[name].flatten() for each in columns]) for name in columns[0]}
        shapes = torch.tensor([each["input_ids"].shape for each in columns])
        numbers = [torch.from_numpy(each.numbers) for each in samples]
        padded = pad_sequence(numbers, batch_first=True, padding_value=-1)
        return {**flat, "shapes": shapes, "numbers": padded}

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        from .losses import contrast, follow

        options, numbers, teacher = self.options, batch["numbers"], batch.get("teacher")
        inputs = {name: each for name, each in batch.items() if name not in ("numbers", "teacher")}
        vectors = model(**inputs)
        heat, ranks = options.temperature, self._ranks
        loss = contrast(vectors, numbers, heat, options.sizes, ranks)
        if teacher is None:
            return loss
        learned = follow(vectors, teacher, numbers, heat, ranks)
        return options.distill_alpha * loss + (1 - options.distill_alpha) * learned

    def compute_outputs(
        self, context: TrainContext, teacher: Loaded, samples: Grouped
    ) -> NDArray[Any]:
        """Return the vectors of all texts, by their numbers."""
        from .evaluation import encode_together

        return encode_together(context, teacher, samples.parts, samples.first)

    def evaluate(
        self, context: TrainContext, loaded: Loaded, records: Sequence[Group], samples: Grouped
    ) -> dict[str, Any]:
        from .evaluation import evaluate

        return evaluate(context, loaded, _plain(records), samples, self._corpus)

    def evaluation_tokens(self, samples: Grouped) -> int:
        corpus = self._corpus.samples.lengths.sum() if self._corpus else 0
        return super().evaluation_tokens(samples) + int(corpus)

    @classmethod
    def has_trained(cls, folder: Path, architectures: Sequence[str]) -> bool:
        # A bare encoder has learned no vectors, unless it is one of sentence-transformers.
        is_bare = any(name.endswith("Model") for name in architectures)
        return is_bare and (folder / "modules.json").exists()

    @classmethod
    def predict(cls, loaded: Loaded, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return the vector of each row's ``text``, with length 1."""
        from ...training.evaluation import run_texts
        from .encoder import find_pooling, pool, read_declared

        texts = [[row.text("text").strip()] for row in rows]
        pooling = find_pooling(read_declared(loaded.model.name_or_path))
        found = run_texts(
            loaded,
            texts,
            lambda tokens, output: pool(output[0], tokens["attention_mask"], pooling).tolist(),
        )
        return [{"embedding": vector} for vector in found]
