"""Learn vectors of texts from pairs, such as questions and the passages that answer them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ...data.records import require_text
from ...data.table import Table, choose_column
from ...runtime.errors import DatasetError
from ...training.options import SMALL, Range, option
from ...training.task import Data, Loaded
from ...training.text_task import Row, RowOptions, TableTask, text_columns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from ...data.tokens import Ints, Longs, TextSample, TextSamples
    from ...runtime.ranks import Ranks
    from ...training.state import TrainContext

FOUND_AT = (1, 10)
"""The results contain recall among this many candidates."""
MOST_TOKENS = 8192
_RANKED_TOGETHER = 256


@dataclass(frozen=True)
class EmbedOptions(RowOptions):
    """One training run of an encoder. Raises ``ValueError`` if a batch would be split."""

    task = "embed"
    metrics: ClassVar[Mapping[str, str]] = {
        "mrr": "max",
        **{f"recall_at_{most}": "max" for most in FOUND_AT},
    }
    splits_batches = False
    # Pairs with the same passage have about the same length. In one batch, they would leave few negatives.
    batches_sharing_lengths = 8

    text_column: str | None = option(
        None, "column with the anchors, such as questions", metavar="NAME"
    )
    pair_column: str | None = option(
        None, "column with each anchor's positive, such as the passage to find", metavar="NAME"
    )
    negative_column: str | None = option(
        None, "column with a text that is not to be found for the anchor", metavar="NAME"
    )
    temperature: float = option(
        0.05, "divides cosine similarities before the softmax", within=Range(0.001, 10)
    )
    epochs: int = RowOptions.redefine("epochs", 1)
    batch_size: int = RowOptions.redefine("batch_size", 32)
    max_length: int = RowOptions.redefine("max_length", 256)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate > 1:
            raise ValueError(
                "--accumulate: `embed` needs whole batches, in which every text is a negative of the "
                "others; use a smaller --batch-size"
            )


class Group(NamedTuple):
    """An anchor, its positive, and perhaps a negative."""

    texts: tuple[str, ...]


class GroupSample(NamedTuple):
    """A group as tokens; ``ids`` are equal for equal texts."""

    texts: Sequence[TextSample]
    ids: Longs


@dataclass(frozen=True)
class Groups:
    """Groups as tokens, with a row of ``ids`` for each column: equal for equal texts."""

    columns: Sequence[TextSamples]
    ids: Longs

    def __len__(self) -> int:
        return int(self.ids.shape[1])

    def __getitem__(self, index: int) -> GroupSample:
        return GroupSample([column[index] for column in self.columns], self.ids[:, index])

    @cached_property
    def lengths(self) -> Ints:
        """Every group's number of tokens."""
        return sum(column.lengths for column in self.columns)  # type: ignore[return-value]

    def token_ids(self) -> Longs:
        """Return the IDs that occur in any text, ascending."""
        from ...data.tokens import distinct

        return distinct(*(column.token_ids() for column in self.columns))

    def digest(self) -> str:
        """Return a digest of all groups."""
        digests = "".join(column.digest() for column in self.columns)
        return blake2b(digests.encode(), digest_size=16).hexdigest()


class Embed(TableTask[EmbedOptions]):
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
    text_columns = ("anchor", "query", "question", "sentence1", "sentence", "text")
    pair_columns = ("positive", "passage", "context", "answer", "sentence2", "pair", "document")
    negative_columns = ("negative", "hard_negative")
    _ranks: Ranks

    def choose_columns(self, table: Table) -> list[str]:
        options = self.options
        found = [
            choose_column(table, options.text_column, self.text_columns, "--text-column"),
            choose_column(table, options.pair_column, self.pair_columns, "--pair-column"),
        ]
        asked = options.negative_column
        if asked is not None or not {*self.negative_columns}.isdisjoint(table.columns):
            found.append(choose_column(table, asked, self.negative_columns, "--negative-column"))
        return found

    def convert(self, place: str, row: Any, *columns: str) -> Group:
        texts = (require_text(row.get(each), f"{place}: column {each!r}") for each in columns)
        return Group(tuple(text.strip() for text in texts))

    def read(self, note: Callable[[str], None]) -> Data:
        data = super().read(note)
        # Otherwise nothing could be learned, or everything found.
        first = data.train[0].texts[1]
        if all(group.texts[1] == first for group in data.train):
            raise DatasetError(f"{data.train_source}: all its pairs have the same second text")
        return data

    def load(self, context: TrainContext, data: Data) -> Loaded:
        from ...training.model import load_model
        from .encoder import BiEncoder

        self._ranks = context.ranks
        texts = (text for group in data.train for text in group.texts)
        loaded = load_model(self.options, self.head, texts, context.ranks)
        # Saved with the tokenizer, so that `predict` cuts texts as training did.
        loaded.tokenizer.model_max_length = self.options.max_length
        return loaded._replace(model=BiEncoder(loaded.model, self.options.max_length))

    def prepare(self, context: TrainContext, loaded: Loaded, records: Sequence[Group]) -> Groups:
        import numpy as np

        columns = text_columns(records)
        samples = [
            self.encode_samples(context, loaded, [column], range(len(records)))
            for column in columns
        ]
        ids = [np.fromiter(map(_digest, column), np.int64, len(records)) for column in columns]
        return Groups(samples, np.stack(ids))

    def collate(self, samples: Sequence[GroupSample], loaded: Loaded) -> dict[str, Tensor]:
        import numpy as np
        import torch

        from ...training.batches import pad_inputs

        columns = [
            pad_inputs(column, loaded.pad_token)
            for column in zip(*(sample.texts for sample in samples), strict=True)
        ]
        flat = {name: torch.cat([each[name].flatten() for each in columns]) for name in columns[0]}
        shapes = torch.tensor([each["input_ids"].shape for each in columns])
        ids = torch.from_numpy(np.stack([sample.ids for sample in samples], axis=1))
        return {**flat, "shapes": shapes, "ids": ids}

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        from .encoder import contrast

        inputs = {name: each for name, each in batch.items() if name != "ids"}
        return contrast(model(**inputs), batch["ids"], self.options.temperature, self._ranks)

    def evaluate(
        self, context: TrainContext, loaded: Loaded, records: Sequence[Group], samples: Groups
    ) -> dict[str, Any]:
        import numpy as np

        from ...runtime.output import save_json

        # Each distinct text once, by its place in the columns, one after the other.
        anchors, first = np.unique(samples.ids[0], return_index=True)
        candidates, others = np.unique(samples.ids[1:], return_index=True)
        others += len(samples)
        vectors = _encode_together(context, loaded, samples, np.concatenate([first, others]))
        if not context.ranks.first:
            return {}
        pairs = np.unique(samples.ids[:2], axis=1)
        rows = np.searchsorted(anchors, pairs[0])
        own = vectors[: len(anchors)]
        places, best = rank_candidates(
            own, vectors[len(anchors) :], rows, np.searchsorted(candidates, pairs[1])
        )
        reached = np.full(len(anchors), len(candidates))
        np.minimum.at(reached, rows, places)
        texts = [group.texts for group in records]
        found = others[best]
        predictions = [
            {
                "anchor": texts[one][0],
                "rank": int(place),
                "best": texts[other % len(texts)][other // len(texts)],
            }
            for one, place, other in zip(first, reached, found, strict=True)
        ]
        save_json(context.output / "predictions.json", predictions)
        recall = {
            f"recall_at_{most}": np.bincount(rows, places <= most) / np.bincount(rows)
            for most in FOUND_AT
        }
        scores = {**recall, "mrr": 1 / reached}
        return {
            **{name: round(100 * float(each.mean()), 3) for name, each in scores.items()},
            "candidates": len(candidates),
        }

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

        texts, limit = (
            [[row.text("text").strip()] for row in rows],
            loaded.tokenizer.model_max_length,
        )
        pooling = find_pooling(read_declared(loaded.model))
        return [
            {"embedding": vector}
            for tokens, output in run_texts(loaded, texts, min(limit, MOST_TOKENS))
            for vector in pool(output[0], tokens["attention_mask"], pooling).tolist()
        ]


def _digest(text: str) -> int:
    """Return a number for a text, the same on all ranks."""
    found = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(found, "little", signed=True)


def _encode_together(
    context: TrainContext, loaded: Loaded, samples: Groups, places: Longs
) -> NDArray[np.float32]:
    """Return the vectors of the texts at these places of all columns, computed by all ranks."""
    import numpy as np
    import torch

    from ...training.batches import pad_inputs
    from ...training.evaluation import compute_together

    count = len(samples)
    lengths = np.concatenate([column.lengths for column in samples.columns])[places]

    def encode(batches: Sequence[Longs]) -> Iterator[tuple[Longs, NDArray[np.float32]]]:
        loaded.model.eval()
        with torch.inference_mode(), context.autocast():
            for chosen in batches:
                found = places[chosen].tolist()
                rows = [samples.columns[each // count][each % count] for each in found]
                yield chosen, loaded.model.encode(**pad_inputs(rows, loaded.pad_token)).numpy()

    parts = compute_together(context.ranks, lengths, encode)
    order = np.argsort(np.concatenate([chosen for chosen, _ in parts]))
    return np.concatenate([vectors for _, vectors in parts])[order]


def rank_candidates(
    anchors: NDArray[np.float32], candidates: NDArray[np.float32], rows: Longs, wanted: Longs
) -> tuple[Longs, Longs]:
    """Return the rank, from 1, of each pair's candidate for its anchor, and each anchor's best candidate.

    Vectors have shape (texts, size). Among candidates with equal scores, the wanted one is the last.
    """
    import numpy as np

    ranks = np.empty(len(rows), dtype=np.int64)
    best = np.empty(len(anchors), dtype=np.int64)
    for first in range(0, len(anchors), _RANKED_TOGETHER):
        scores = anchors[first : first + _RANKED_TOGETHER] @ candidates.T
        best[first : first + len(scores)] = scores.argmax(axis=1)
        for pair in np.flatnonzero((rows >= first) & (rows < first + len(scores))):
            own = scores[rows[pair] - first]
            ranks[pair] = np.count_nonzero(own >= own[wanted[pair]])
    return ranks, best
