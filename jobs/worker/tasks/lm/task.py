"""Causal language models: predict each token of a text from those before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...data.records import require_text
from ...data.table import Table, choose_column
from ...runtime.errors import DatasetError, ModelError
from ...training.options import SCRATCH, SMALL
from ...training.task import Data, Loaded
from ...training.text_task import Row, TableTask
from .model import LmOptions, has_dropout, prepare_model

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ...data.tokens import Ints, Longs, TextSample, Tokens
    from ...training.state import TrainContext

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
"""A new model's, of Llama's architecture."""


class Lm(TableTask[LmOptions]):
    """``perplexity`` in the results is the exponential of the mean loss of the evaluation data's tokens."""

    name = "lm"
    Options = LmOptions
    demo = LmOptions(data=str(Path(__file__).with_name("lm.sample.txt")), max_length=32, **SMALL)
    help = "a causal language model, all of it or adapters (LoRA)"
    pipeline_tag = "text-generation"
    head = "CausalLM"
    text_columns = ("text", "content", "document", "sentence", "messages", "conversations")
    settings = frozenset({"max_new_tokens", "temperature", "top_p", "seed", "perplexity"})
    predict_columns = ("messages", "conversations", "prompt", *text_columns)

    def choose_columns(self, table: Table) -> list[str]:
        return [choose_column(table, self.options.text_column, self.text_columns, "--text-column")]

    def convert(self, place: str, row: Any, *columns: str) -> str:
        (column,) = columns
        if isinstance(row.get(column), (list, dict)):
            raise DatasetError(
                f"{place}: column {column!r} is a chat or a list, not a text",
                hint="write each chat as one text: tokenizer.apply_chat_template(chat, tokenize=False)",
            )
        return require_text(row.get(column), f"{place}: column {column!r}")

    def load(self, context: TrainContext, data: Data) -> Loaded:
        from transformers import AutoModelForCausalLM

        from ...training.model import load_pretrained, require_length
        from .head import use_chunks
        from .memory import Plan, require_memory

        options, note = self.options, context.events.note
        plan = Plan(options, context.precision.dtype, context.ranks.size)
        if options.model == SCRATCH:
            config, tokenizer = _describe_new(context, data.train)
            require_memory(context, plan, config)
            loaded = Loaded(AutoModelForCausalLM.from_config(config), tokenizer)
        else:
            require_memory(context, plan, options.model)
            keep = options.attention_dropout == "on"
            loaded = load_pretrained(
                options.model, self.head, keep_dropout=keep, dtype=plan.loaded_as
            )
        require_length(options, loaded)
        if loaded.tokenizer.eos_token_id is None:
            raise ModelError(
                f"the tokenizer of {options.model} has no token for the end of a text",
                hint="set its eos_token and save it again",
            )
        if options.gradient_checkpointing and has_dropout(loaded.model):
            note("dropout is off: a layer that is computed again would drop other values")
        if not use_chunks(loaded.model):
            note("this model's own loss is used, which keeps all logits in memory")
        return loaded._replace(model=prepare_model(loaded.model, options))

    def prepare(self, context: TrainContext, loaded: Loaded, records: Sequence[str]) -> Packed:

        from ...data.tokens import Column

        (tokens,) = self.encode(context, loaded, [Column(records)])
        packed = Packed(tokens, loaded.tokenizer.eos_token_id, self.options.max_length)
        if packed.size < 2:
            raise DatasetError("the texts have no tokens")
        return packed

    def weights(self, samples: Any) -> np.ndarray[Any, Any]:
        # The first token is not predicted.
        weights: np.ndarray[Any, Any] = samples.lengths.astype("int64") - 1
        return weights

    def collate(self, samples: Sequence[TextSample], loaded: Loaded) -> dict[str, Tensor]:
        from ...training.batches import pad_inputs
        from .head import IGNORED

        batch = pad_inputs(samples, loaded.pad_token)
        # Not for the model: padding is at the end, where no token sees it.
        mask = batch.pop("attention_mask")
        return {**batch, "labels": batch["input_ids"].masked_fill(mask == 0, IGNORED)}

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch, use_cache=False).loss
        return loss

    def evaluate(
        self, context: TrainContext, loaded: Loaded, records: Sequence[str], samples: Packed
    ) -> dict[str, Any]:
        from ...runtime.output import save_json
        from ...training.evaluation import compute_together
        from .head import token_losses

        def measure(batches: Sequence[Longs]) -> Iterator[list[tuple[int, float]]]:
            for chosen in batches:
                rows = [samples[int(index)] for index in chosen]
                ids = self.collate(rows, loaded)["input_ids"]
                with context.autocast():
                    losses = token_losses(loaded.model, ids)
                yield [
                    (int(index), float(each[: len(row) - 1].double().sum()))
                    for index, row, each in zip(chosen, rows, losses, strict=True)
                ]

        parts = compute_together(context.ranks, samples.lengths, measure)
        sums = [total for _, total in sorted(pair for part in parts for pair in part)]
        counts = self.weights(samples)
        if context.ranks.first:
            means = [
                round(total / int(count), 6) for total, count in zip(sums, counts, strict=True)
            ]
            save_json(context.output / "predictions.json", [{"loss": mean} for mean in means])
        tokens = int(counts.sum())
        return {"perplexity": perplexity(fsum(sums) / tokens), "eval_tokens": tokens}

    @classmethod
    def read_input(cls, name: str, value: Any, place: str) -> dict[str, Any]:  # noqa: ARG003
        if isinstance(value, list):
            return {"messages": value}
        # A file's texts are continued as they are: a chat is written as messages.
        return {"prompt": require_text(value, place)}

    @classmethod
    def predict(cls, loaded: Loaded, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return what the model adds to each text, or the text's perplexity and number of tokens."""
        from .generate import complete

        return (_measure if loaded.settings.get("perplexity") else complete)(loaded, rows)


def _measure(loaded: Loaded, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return each text's perplexity; what is beyond the longest input is cut off."""
    import torch

    from ...training.model import longest_input
    from .head import token_losses

    found, limit = list[dict[str, Any]](), longest_input(loaded) or LONGEST_TEXT
    for row in rows:
        text = row.text("prompt" if "prompt" in row.values else "text")
        ids = loaded.tokenizer(text, truncation=True, max_length=limit)["input_ids"]
        if len(ids) < 2:
            raise DatasetError(f"{row.place}: 'text' has fewer than two tokens")
        losses = token_losses(loaded.model, torch.tensor([ids]))
        found.append({"perplexity": perplexity(float(losses.mean())), "tokens": len(ids)})
    return found


LONGEST_TEXT = 8192


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss."""
    return round(exp(min(loss, 700.0)), 3)


@dataclass(frozen=True)
class Packed:
    """Texts one after the other, each with the token ``end``, cut into samples of ``length`` tokens.

    The last sample may be shorter.
    """

    tokens: Tokens
    end: int
    length: int

    @cached_property
    def _ends(self) -> Longs:
        """The place of each text's end."""
        import numpy as np

        ends: Longs = self.tokens.bounds[1:] + np.arange(len(self.tokens.bounds) - 1)
        return ends

    @cached_property
    def size(self) -> int:
        """The number of tokens."""
        size = len(self.tokens.ids) + len(self._ends)
        # A last sample of one token predicts nothing.
        return size - (size > 1 and size % self.length == 1)

    def __len__(self) -> int:
        return -(-self.size // self.length)

    @cached_property
    def lengths(self) -> Ints:
        """Every sample's number of tokens."""
        import numpy as np

        lengths = np.full(len(self), self.length, dtype=np.int32)
        lengths[-1] = self.size - self.length * (len(self) - 1)
        return lengths

    def __getitem__(self, index: int) -> TextSample:
        import numpy as np

        from ...data.tokens import TextSample

        begin = index * self.length
        stop = min(begin + self.length, self.size)
        first, last = (int(each) for each in np.searchsorted(self._ends, (begin, stop)))
        ids = self.tokens.ids[begin - first : stop - last]
        places = self._ends[first:last] - begin - np.arange(last - first)
        return TextSample({"input_ids": np.insert(ids, places, self.end)}, None, 0)

    def token_ids(self) -> Longs:
        """Return the IDs in all samples, ascending."""
        from ...data.tokens import distinct

        return distinct([self.end], self.tokens.ids)

    def digest(self) -> str:
        """Return a digest of all samples."""
        from hashlib import blake2b

        found = blake2b(f"{self.length} {self.end}".encode(), digest_size=16)
        found.update(self.tokens.bounds.data)
        found.update(self.tokens.ids.data)
        return found.hexdigest()


def _describe_new(context: TrainContext, texts: Sequence[str]) -> tuple[Any, Any]:
    """Return the configuration and the tokenizer of a new model."""
    from transformers import LlamaConfig

    from ...training.model import new_tokenizer, train_tokenizer

    ranks = context.ranks
    tokenizer = new_tokenizer(ranks.share(train_tokenizer(texts) if ranks.first else None))
    tokenizer.eos_token = tokenizer.sep_token
    ends = {"eos_token_id": tokenizer.sep_token_id, "bos_token_id": tokenizer.cls_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
        **ends,
        **SHAPE,
    )
    return config, tokenizer
