"""A question answering model with its tokenizer: from a folder, from the hub, or new."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from ..runtime.errors import ModelError, TrainingError, first_line
from ..runtime.ranks import Ranks
from .batches import ALIGN
from .options import SCRATCH, TrainOptions

SCRATCH_VOCABULARY = 8192
"""At most so many word pieces; a small training file gives fewer."""
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SCRATCH_SHAPE = {"dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 256}
# No dropout: the new model's task is to learn its data by heart.
SCRATCH_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "qa_dropout": 0.0}
ATTENTION_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob")
"""What configurations call the dropout of attention weights: DistilBERT's, and BERT's and others'."""


class Loaded(NamedTuple):
    """A ``torch.nn.Module`` of transformers with a question answering head, and its tokenizer.

    ``new_weights`` are the names of those that its files have not, so that they are random, ``own``
    the configuration's values that training has replaced, for the model when it is saved.
    """

    model: Any
    tokenizer: Any
    new_weights: tuple[str, ...] = ()
    own: Mapping[str, float] = MappingProxyType({})

    @property
    def pad_token(self) -> int:
        """What fills a batch's shorter rows; masked, so its value has no meaning."""
        return self.tokenizer.pad_token_id or 0

    @property
    def longest(self) -> int | None:
        """How many tokens the model takes, as a multiple of the width of batches; None: any number."""
        limits = [getattr(self.model.config, "max_position_embeddings", None)]
        for name, module in self.model.named_modules():
            # RoBERTa's and others' positions begin after that of the padding.
            before = getattr(module, "padding_idx", None)
            if name.endswith("position_embeddings") and before is not None:
                limits.append(module.num_embeddings - before - 1)
        known = [limit for limit in limits if limit and limit > 0]  # XLNet says -1
        return min(known) // ALIGN * ALIGN if known else None


def load_model(options: TrainOptions, texts: Iterable[str], ranks: Ranks) -> Loaded:
    """The model that the options name, the same on every rank; raises :class:`ModelError`.

    ``texts`` are what a new model's tokenizer is trained on. Without a question answering head of
    its own a model gets a new one, from torch's current random state.
    """
    name, max_length = options.model, options.max_length
    keep = options.attention_dropout
    loaded = _new(texts, ranks) if name == SCRATCH else load_pretrained(name, keep_dropout=keep)
    limit = loaded.longest
    if limit is not None and max_length > limit:
        raise ModelError(
            f"--max-length {max_length} is more than the {limit} tokens that model {name} takes",
            hint=f"use --max-length {limit} or less",
        )
    return loaded


def load_pretrained(name: str, *, keep_dropout: bool = True) -> Loaded:
    """A model with its tokenizer, from a folder or the hub; raises :class:`ModelError`."""
    from transformers import (
        AutoConfig,
        AutoModelForQuestionAnswering,
        AutoTokenizer,
        logging,
    )

    # Each rank would print a table of the weights that are new, which the first one says in a line.
    logging.set_verbosity_error()
    looks_local = name.startswith(("/", "./", "../", "~"))
    path = Path(name).expanduser()
    if looks_local and not path.is_dir():
        raise ModelError(f"model {name}: no such folder")
    source = str(path) if path.is_dir() else name
    try:
        config = AutoConfig.from_pretrained(source)
        own = {} if keep_dropout else attention_dropouts(config)
        with nullcontext() if keep_dropout else without_attention_dropout(config):
            model, found = AutoModelForQuestionAnswering.from_pretrained(
                source, config=config, output_loading_info=True
            )
        tokenizer = AutoTokenizer.from_pretrained(source, use_fast=True)
    # The library raises whatever its parts raise: OSError, ValueError, the hub's, safetensors'.
    except Exception as error:
        raise ModelError(
            f"model {name} can't be loaded: {first_line(error)}",
            hint="give a folder with config.json, weights and tokenizer, or a hub model's name",
        ) from error
    _require_fitting(name, model, tokenizer)
    # Newer transformers keep the type that the files have: fp16 would be trained as such.
    return Loaded(model.float(), tokenizer, tuple(sorted(found["missing_keys"])), own)


def _require_fitting(name: str, model: Any, tokenizer: Any) -> None:
    """Raises :class:`ModelError` for a tokenizer that answers can't be found with, or of another model."""
    if not tokenizer.is_fast:
        raise ModelError(f"model {name} has no fast tokenizer, so answers can't be located")
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if rows is not None and len(tokenizer) > rows:
        raise ModelError(
            f"model {name} knows {rows} tokens, and its tokenizer has {len(tokenizer)}",
            hint="save it again after model.resize_token_embeddings(len(tokenizer))",
        )
    taken = inspect.signature(model.forward).parameters
    tokenizer.model_input_names = [each for each in tokenizer.model_input_names if each in taken]


def attention_dropouts(config: Any) -> dict[str, float]:
    """The dropouts of attention weights that a configuration has."""
    return {name: getattr(config, name) for name in ATTENTION_DROPOUTS if hasattr(config, name)}


@contextmanager
def without_attention_dropout(config: Any) -> Iterator[None]:
    """A model that is made from ``config`` inside drops out no attention weights.

    torch's fused attention for CPUs knows no dropout: with it, every layer writes all weights of
    all heads to memory. Dropout of what layers return stays. Afterwards ``config`` is as it was; a
    model that has a copy of it is to get its own values back when it is saved.
    """
    known = attention_dropouts(config)
    for name in known:
        setattr(config, name, 0.0)
    try:
        yield
    finally:
        for name, value in known.items():
            setattr(config, name, value)


def _new(texts: Iterable[str], ranks: Ranks) -> Loaded:
    from transformers import (
        DistilBertConfig,
        DistilBertForQuestionAnswering,
    )

    # Trained once and shared: the nodes' libraries need not agree on every detail.
    tokenizer = new_tokenizer(ranks.share(train_tokenizer(texts) if ranks.first else None))
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        **SCRATCH_SHAPE,
        **SCRATCH_DROPOUT,
    )
    return Loaded(DistilBertForQuestionAnswering(config), tokenizer)


def save_model(folder: Path, loaded: Loaded) -> None:
    """Write ``model/``, complete or not at all; raises :class:`TrainingError`."""
    target, partial = folder / "model", folder / ".model.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        for name, value in loaded.own.items():
            setattr(loaded.model.config, name, value)
        loaded.model.save_pretrained(partial)
        loaded.tokenizer.save_pretrained(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    # A disk that is full is no OSError to safetensors.
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainingError(
            f"{target} can't be written: {first_line(error)}",
            hint="make room, then --resume: the last checkpoint has all that was learnt",
        ) from error


def new_tokenizer(serialized: str) -> Any:
    """A fast tokenizer of transformers from what :func:`train_tokenizer` made."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(serialized),
        unk_token="[UNK]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "attention_mask"],
    )


def train_tokenizer(texts: Iterable[str]) -> str:
    """A new WordPiece tokenizer in BERT's uncased manner, as JSON; the same for the same texts."""
    tokenizer = _bare_tokenizer(models.WordPiece(_train_vocabulary(list(texts)), unk_token="[UNK]"))
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    serialized: str = tokenizer.to_str()
    return serialized


def _train_vocabulary(texts: list[str]) -> dict[str, int]:
    tokenizer = _bare_tokenizer(models.WordPiece(unk_token="[UNK]"))
    normalize = tokenizer.normalizer.normalize_str
    # The trainer numbers word-internal characters in the random order of a hash table, and ties
    # follow these numbers; announced as special tokens, they get theirs in a fixed order.
    characters = sorted(set("".join("".join(map(normalize, texts)).split())))
    inner = [f"##{character}" for character in characters]
    trainer = trainers.WordPieceTrainer(
        vocab_size=SCRATCH_VOCABULARY, special_tokens=SPECIAL_TOKENS + inner, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary


def _bare_tokenizer(model: Any) -> Any:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer
