"""Causal language models: predict each token of a text from those before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import chain
from math import exp, fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...data.records import refusal, require_text, skip_note
from ...data.table import Table, choose_column
from ...runtime.errors import DatasetError, ModelError
from ...training.options import SCRATCH, SMALL
from ...training.task import Data, Loaded
from ...training.text_task import Row, TableTask
from .chats import (
    CHATS,
    PAIR,
    Exchange,
    find_columns,
    is_learned,
    may_have_template,
    read_chat_template,
    read_exchange,
    require_whole,
)
from .model import LmOptions, has_dropout, prepare_model

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ...data.tokens import Longs, TextSample
    from ...training.state import TrainContext
    from .samples import Masked, Packed

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
    plain_scores: ClassVar[Mapping[str, str]] = {"perplexity": ""}
    pipeline_tag = "text-generation"
    head = "CausalLM"
    other_columns = "completions"
    text_columns = ("text", "content", "document", "sentence")
    settings = frozenset({"max_new_tokens", "temperature", "top_p", "seed", "perplexity"})
    carried = ("tools",)
    adds = ("completion", "finish_reason", "perplexity", "tokens")
    shard_rows = 64
    autocasts = False
    predict_columns = (*CHATS, "prompt", *text_columns)
    _are_chats: bool | None = None
    """Whether exchanges are lists of turns; None for plain texts."""

    def choose_columns(self, table: Table) -> list[str]:
        asked = self.options.text_column
        if found := find_columns(table, asked):
            return found
        if asked is None and not {*self.text_columns} & {name.strip() for name in table.columns}:
            require_whole(table)
        return [choose_column(table, asked, self.text_columns, "--text-column")]

    def input_columns(self, table: Table) -> dict[str, str]:
        columns = self.choose_columns(table)
        if len(columns) > 1:
            return {"prompt": columns[0]}
        return {"messages" if find_columns(table, columns[0]) else "text": columns[0]}

    def convert(self, place: str, row: Any, *columns: str) -> str | Exchange:
        if len(columns) == 1 and columns[0].strip() not in CHATS:
            (column,) = columns
            if isinstance(row.get(column), (list, dict)):
                raise DatasetError(
                    f"{place}: column {column!r} is a list, not a text",
                    hint=f"call the column {CHATS[0]!r} if its rows are chats",
                )
            return require_text(row.get(column), f"{place}: column {column!r}")
        found = read_exchange(place, row, columns)
        if self.options.train_on == "all" and not all(map(is_learned, found.turns)):
            raise DatasetError(
                f"{place}: has a turn with the weight 0, and --train-on all would learn it",
                hint="leave out --train-on all, or remove the weight",
            )
        is_chat = bool(found.turns)
        if self._are_chats is None:
            self._are_chats = is_chat
        if self._are_chats is not is_chat:
            this, others = ("lists of turns", "texts")[:: 1 if is_chat else -1]
            raise DatasetError(
                f"{place}: prompt and completion are {this}, and in other rows {others}",
                hint="give all rows the same form",
            )
        return found

    def _records(
        self, table: Table, skipped: list[DatasetError] | None, note: Callable[[str], None]
    ) -> Sequence[Any]:
        found = super()._records(table, skipped, note)
        if "system" in table.columns and self._are_chats is not None:
            note(
                f"{table.source}: column 'system' is not read: a system prompt is a chat's first turn"
            )
        return found

    def check(self) -> str:
        found = super().check()
        options = self.options
        if options.chat_template is not None:
            read_chat_template(options.chat_template)
        elif self._are_chats and not may_have_template(options.model):
            raise DatasetError(f"the tokenizer of {options.model} {_NO_TEMPLATE}", hint=_GIVE_ONE)
        return found

    def load(self, context: TrainContext, data: Data) -> Loaded:
        from transformers import AutoModelForCausalLM

        from ...training.model import load_pretrained, require_length
        from .head import use_chunks
        from .memory import Plan, require_memory

        options, note = self.options, context.events.note
        new = _describe_new(context, data.train) if options.model == SCRATCH else None
        width = self._find_width(data.train, new[1] if new else None)
        plan = Plan(options, context.precision.dtype, context.ranks.size, width)
        require_memory(context, plan, new[0] if new else options.model)
        if new:
            loaded = Loaded(AutoModelForCausalLM.from_config(new[0]), new[1])
        else:
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
        self._set_template(loaded.tokenizer)
        if self._are_chats and not loaded.tokenizer.chat_template:
            raise ModelError(f"the tokenizer of {options.model} {_NO_TEMPLATE}", hint=_GIVE_ONE)
        if options.gradient_checkpointing and has_dropout(loaded.model):
            note("dropout is off: a layer that is computed again would drop other values")
        if not use_chunks(loaded.model):
            note("this model's own loss is used, which keeps all logits in memory")
        return loaded._replace(model=prepare_model(loaded.model, options))

    def _set_template(self, tokenizer: Any) -> None:
        if self.options.chat_template is not None:
            tokenizer.chat_template = read_chat_template(self.options.chat_template)

    def _find_width(self, records: Sequence[Any], tokenizer: Any) -> int | None:
        """Return about the number of tokens of the longest exchange; None if that is not known."""
        from transformers import AutoTokenizer

        from .templates import Renderer

        def size(exchange: Exchange) -> int:
            return sum(len(text.encode()) for text in exchange.texts)

        if not isinstance(records[0], Exchange):
            return None
        try:
            name = str(Path(self.options.model).expanduser())
            name = name if Path(name).is_dir() else self.options.model
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(name)
            self._set_template(tokenizer)
            render = Renderer(tokenizer, learn_all=True)
            texts = [render(each).text for each in nlargest(MEASURED, records, size)]
            return max(map(len, tokenizer(texts)["input_ids"]))
        # A missing tokenizer is explained when the model is loaded, a bad row when all are rendered.
        except Exception:
            return None

    def prepare(
        self, context: TrainContext, loaded: Loaded, records: Sequence[Any]
    ) -> Packed | Masked:
        from ...data.tokens import Column
        from .samples import Packed, read_prefix

        if isinstance(records[0], Exchange):
            return self._prepare_exchanges(context, loaded, records)
        (tokens,) = self.encode(context, loaded, [Column(records)])
        if not len(tokens.ids):
            raise DatasetError("the texts have no tokens")
        tokenizer = loaded.tokenizer
        prefix = read_prefix(tokenizer)
        return Packed(tokens, tokenizer.eos_token_id, self.options.max_length, prefix)

    def _prepare_exchanges(
        self, context: TrainContext, loaded: Loaded, records: Sequence[Exchange]
    ) -> Masked:
        from ...data.tokens import Column, read_template
        from .samples import learn_end, mask_texts
        from .templates import Renderer, note_dropped, render_together

        options, tokenizer, note = self.options, loaded.tokenizer, context.events.note
        skipped = list[DatasetError]()
        render = Renderer(tokenizer, options.train_on == "all")
        rendered = render_together(context.ranks, records, render, skipped)
        if skipped and not (rendered and options.skip_bad_records):
            raise refusal(skipped, has_good=bool(rendered))
        if skipped:
            note(skip_note(skipped))
        note_dropped(rendered, note)
        (tokens,) = self.encode(
            context, loaded, [Column([each.text for each in rendered], offsets=True)]
        )
        # Chat templates write the beginning of a text themselves.
        chats = self._are_chats
        prefix: Any = () if chats else read_template(tokenizer, pair=False).prefix
        samples = mask_texts(tokens, rendered, prefix, options.max_length, note)
        if chats:
            learn_end(samples, loaded, note, lora=options.lora)
        return samples

    def weights(self, samples: Any) -> np.ndarray[Any, Any]:
        weights: np.ndarray[Any, Any] = samples.predicted
        return weights

    def collate(self, samples: Sequence[TextSample], loaded: Loaded) -> dict[str, Tensor]:
        from ...training.batches import pad_inputs
        from .head import IGNORED

        batch = pad_inputs(samples, loaded.pad_token)
        # Not for the model: padding is at the end, where no token sees it.
        mask = batch.pop("attention_mask")
        return {**batch, "labels": batch["labels"].masked_fill(mask == 0, IGNORED)}

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch, use_cache=False).loss
        return loss

    def evaluate(
        self,
        context: TrainContext,
        loaded: Loaded,
        records: Sequence[Any],
        samples: Packed | Masked,
    ) -> dict[str, Any]:
        from ...training.evaluation import compute_together, in_order
        from .head import IGNORED, token_losses

        def measure(batches: Sequence[Longs]) -> Iterator[tuple[Longs, np.ndarray[Any, Any]]]:
            for chosen in batches:
                batch = self.collate([samples[int(index)] for index in chosen], loaded)
                with context.autocast():
                    losses = token_losses(loaded.model, batch["input_ids"]).double()
                losses = losses.masked_fill(batch["labels"][:, 1:] == IGNORED, 0.0)
                yield chosen, losses.sum(dim=1).numpy()

        sums = in_order(compute_together(context.ranks, samples.lengths, measure)).tolist()
        counts = self.weights(samples).tolist()
        pairs, tokens = zip(sums, counts, strict=True), sum(counts)
        return {
            "predictions": [{"loss": round(loss / n, 6), "tokens": n} for loss, n in pairs],
            "perplexity": perplexity(fsum(sums) / tokens),
            "eval_tokens": tokens,
        }

    @classmethod
    def read_input(cls, name: str, value: Any, place: str) -> dict[str, Any]:  # noqa: ARG003
        if isinstance(value, list):
            return {"messages": value}
        # A file's texts are continued as they are: a chat is written as messages.
        return {"prompt": require_text(value, place)}

    @classmethod
    def check_columns(
        cls, table: Table, columns: Mapping[str, str], settings: Mapping[str, Any]
    ) -> None:
        """Refuse prompts with completions and chats for ``--perplexity``, which would leave out a part."""
        column = columns["text"].strip()
        is_pair = {column, *map(str.strip, table.columns)} >= {*PAIR} and column in PAIR
        if settings.get("perplexity") and (is_pair or column in CHATS):
            what = "prompts with completions" if is_pair else "chats"
            raise DatasetError(f"{table.source}: has {what}, and {_ONLY_TEXTS}", hint=_INSTEAD)

    @classmethod
    def has_trained(cls, folder: Path, architectures: Sequence[str]) -> bool:
        # GPT-2's is GPT2LMHeadModel, Gemma 3's Gemma3ForConditionalGeneration, because it also reads images.
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        others = ("LMHead", *(["ForConditionalGeneration"] if "text_config" in config else []))
        is_other = any(mark in name for mark in others for name in architectures)
        return is_other or super().has_trained(folder, architectures)

    @classmethod
    def predicts_in(cls, settings: Mapping[str, Any]) -> str | None:
        """Each new token reads all weights, and those in bf16 in half the time."""
        from ...runtime.precision import choose_here

        return "bfloat16" if choose_here() == "bf16" and not settings.get("perplexity") else None

    @classmethod
    def predict(cls, loaded: Loaded, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return what the model adds to each text, or the text's perplexity and number of tokens."""
        from .generate import complete

        return (_measure if loaded.settings.get("perplexity") else complete)(loaded, rows)


def _measure(loaded: Loaded, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return each text's perplexity; what is beyond the longest input is cut off, and counted.

    Raises :class:`DatasetError`, also for chats, of which training learns only some turns.
    """
    import torch

    from ...training.model import MOST_TOKENS, longest_input
    from .generate import encode_text
    from .head import token_losses

    found, limit = list[dict[str, Any]](), longest_input(loaded) or MOST_TOKENS
    end = loaded.tokenizer.eos_token_id
    ends = [] if end is None else [end]
    for row in rows:
        values = row.values if isinstance(row.values, dict) else {}
        name = next((each for each in ("messages", "prompt") if each in values), "text")
        if isinstance(values.get(name), list):
            raise DatasetError(f"{row.place}: {name!r} is a chat, and {_ONLY_TEXTS}", hint=_INSTEAD)
        text = row.text(name)
        # As learned: with its end, unless that is cut off.
        own = encode_text(loaded, text)
        ids = [*own, *ends][:limit]
        if len(ids) < 2:
            raise DatasetError(f"{row.place}: {name!r} has fewer than two tokens")
        if loaded.cut is not None:
            loaded.cut[limit] += len(own) > limit
        losses = token_losses(loaded.model, torch.tensor([ids]))
        found.append({"perplexity": perplexity(float(losses.mean())), "tokens": len(ids)})
    return found


MEASURED = 16
"""Exchanges with the longest texts, of which one should have the most tokens."""
_ONLY_TEXTS = "--perplexity is for plain texts only"
_INSTEAD = "`train lm --epochs 0 --eval FILE` computes it for chats and completions"
_NO_TEMPLATE = "has no chat template, and the data are chats"
_GIVE_ONE = "give one with --chat-template FILE, such as a chat model's chat_template.jinja"


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss, with six digits: near 1, fewer would make models equal."""
    return float(f"{exp(min(loss, 700.0)):.6g}")


def _describe_new(context: TrainContext, records: Sequence[Any]) -> tuple[Any, Any]:
    """Return the configuration and the tokenizer of a new model."""
    from transformers import LlamaConfig

    from ...training.model import new_tokenizer, train_tokenizer

    ranks = context.ranks
    is_text = isinstance(records[0], str)
    texts = records if is_text else chain.from_iterable(each.texts for each in records)
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
