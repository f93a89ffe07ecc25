"""transformers' models with their tokenizers: from a folder, from the hub, or new."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model as save_weights
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from ..runtime.errors import ModelError, TrainingError, first_line, hub_hint
from ..runtime.ranks import Ranks
from .batches import ALIGN
from .checkpoints import list_checkpoints
from .options import SCRATCH, TextOptions
from .task import Loaded

SCRATCH_VOCABULARY = 8192
"""Maximum number of word pieces; a small training file gives fewer."""
SCRATCH_CHARACTERS = 1 << 24
"""Characters of text from which they are made: enough to find the most frequent ones."""
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SCRATCH_SHAPE = {"dim": 128, "n_layers": 2, "n_heads": 4, "hidden_dim": 256}
# No dropout: the new model should memorize its data.
SCRATCH_DROPOUT = dict.fromkeys(
    ("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"), 0.0
)
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
ATTENTION_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob")
"""Configuration names of attention dropout: DistilBERT's, and that of BERT and others."""


def longest_input(loaded: Loaded) -> int | None:
    """Return a model's maximum number of tokens, aligned; ``None`` for no limit."""
    limits = [getattr(loaded.model.config, "max_position_embeddings", None)]
    for name, module in loaded.model.named_modules():
        # In RoBERTa and others, positions begin after that of the padding.
        before = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and before is not None:
            limits.append(module.num_embeddings - before - 1)
    known = [limit for limit in limits if limit and limit > 0]  # XLNet says -1
    return min(known) // ALIGN * ALIGN if known else None


def load_model(
    options: TextOptions,
    head: str,
    texts: Iterable[str],
    ranks: Ranks,
    settings: Mapping[str, Any] = NO_SETTINGS,
) -> Loaded:
    """Return the model that the options name, the same on every rank. Raises :class:`ModelError`.

    ``head`` is transformers' name of the task, such as "QuestionAnswering"; a model without this head gets
    a new one, from torch's current random state. ``settings`` are values of its configuration, such
    as ``num_labels``. A new model's tokenizer is trained on ``texts``.
    """
    name = options.model
    if name == SCRATCH:
        loaded = _new(head, texts, ranks, settings)
    else:
        keep = options.attention_dropout == "on"
        loaded = load_pretrained(name, head, settings, keep_dropout=keep)
    require_length(options, loaded)
    return loaded


def require_length(options: TextOptions, loaded: Loaded) -> None:
    """Raise :class:`ModelError` if ``--max-length`` is more than the model takes."""
    limit = longest_input(loaded)
    if limit is not None and options.max_length > limit:
        raise ModelError(
            f"--max-length {options.max_length} is more than the {limit} tokens that model "
            f"{options.model} takes",
            hint=f"use --max-length {limit} or less",
        )


def load_pretrained(
    name: str,
    head: str,
    settings: Mapping[str, Any] = NO_SETTINGS,
    *,
    keep_dropout: bool = True,
    dtype: str | None = None,
) -> Loaded:
    """Return a model with its tokenizer, from a folder or the hub. Raises :class:`ModelError`.

    It is loaded in its files' type and converted to fp32, or loaded in ``dtype``.
    """
    import transformers  # noqa: PLC0415 - reads variables when imported

    # Otherwise each rank prints a table of new weights; rank 0 reports them in one line.
    transformers.logging.set_verbosity_error()
    looks_local = name.startswith(("/", "./", "../", "~"))
    path = Path(name).expanduser()
    if looks_local and not path.is_dir():
        raise ModelError(f"model {name}: no such folder")
    source = str(path) if path.is_dir() else name
    try:
        plain = transformers.AutoConfig.from_pretrained(source)
        config = transformers.AutoConfig.from_pretrained(source, **settings)
        own = {} if keep_dropout else attention_dropouts(config)
        with nullcontext() if keep_dropout else without_attention_dropout(config):
            model, found = _auto_class(head).from_pretrained(
                source,
                config=config,
                output_loading_info=True,
                # A head for other classes is replaced by a new one.
                ignore_mismatched_sizes=bool(settings),
                **({} if dtype is None else {"dtype": dtype}),
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, use_fast=True)
    # The library raises OSError, ValueError, and types of the hub and safetensors.
    except Exception as error:
        raise ModelError(
            f"model {name} can't be loaded: {first_line(error)}",
            hint=hub_hint(
                error,
                name,
                "give a folder with config.json, weights and tokenizer, or a hub model's name",
            ),
        ) from error
    _require_fitting(name, model, tokenizer)
    if head != "CausalLM":
        _set_padding(name, model, tokenizer)
    # Newer transformers keep the files' type: fp16 would be trained as fp16.
    new = {*found["missing_keys"], *(each[0] for each in found.get("mismatched_keys", ()))}
    classes = [*settings.get("id2label", {}).values()]
    if classes and class_names(plain, classes) != classes:
        new |= _renew_head(model, len(classes), new)
    model = model if dtype else model.float()
    return Loaded(model, tokenizer, tuple(sorted(new)), own)


def _auto_class(head: str) -> Any:
    import transformers  # noqa: PLC0415

    return getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")


def _require_fitting(name: str, model: Any, tokenizer: Any) -> None:
    """Raise :class:`ModelError` for a tokenizer that can't locate answers or belongs to another model."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"model {name} has no fast tokenizer, which tells where tokens are in a text"
        )
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if rows is not None and len(tokenizer) > rows:
        raise ModelError(
            f"model {name} has {rows} tokens, its tokenizer {len(tokenizer)}",
            hint="call model.resize_token_embeddings(len(tokenizer)) and save it again",
        )
    taken = inspect.signature(model.forward).parameters
    tokenizer.model_input_names = [each for each in tokenizer.model_input_names if each in taken]


def _set_padding(name: str, model: Any, tokenizer: Any) -> None:
    """Give a model and its tokenizer the same padding token; decoders may have none.

    A classifier finds the last token of a text by its configuration's. Raises :class:`ModelError`.
    """
    if tokenizer.pad_token is None:
        # Not a new token, which would need another embedding.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise ModelError(
            f"model {name} has a tokenizer without a padding token",
            hint="set tokenizer.pad_token and save it again",
        )
    for config in (model.config, model.config.get_text_config()):
        config.pad_token_id = tokenizer.pad_token_id


def order_classes(name: str, classes: list[str]) -> list[str]:
    """Return classes in the order of a model's head, if it was trained for them; else as they are."""
    from transformers import AutoConfig  # noqa: PLC0415 - reads variables when imported

    with suppress(Exception):  # loading the model will report it
        if name != SCRATCH:
            found = class_names(AutoConfig.from_pretrained(str(Path(name).expanduser())), classes)
            return found if sorted(found) == sorted(classes) else classes
    return classes


def class_names(config: Any, wanted: Iterable[str]) -> list[str]:
    """Return a configuration's classes in their order; LABEL_0, LABEL_1, … stand for numbers."""
    names = [str(config.id2label[number]) for number in sorted(config.id2label)]
    bare = [name.removeprefix("LABEL_") for name in names]
    return bare if sorted(bare) == sorted(wanted) else names


def _renew_head(model: Any, classes: int, new: Collection[str]) -> set[str]:
    """Draw new weights for classes that have other meanings than the model's; return their names."""
    prefix = f"{model.base_model_prefix}."
    own = {
        name: each
        for name, each in model.named_parameters()
        if not name.startswith(prefix) and len(each) == classes and name not in new
    }
    for each in own.values():
        with torch.no_grad():
            each.normal_(std=getattr(model.config, "initializer_range", 0.02) * (each.dim() > 1))
    return {*own}


def attention_dropouts(config: Any) -> dict[str, float]:
    """Return a configuration's dropouts of attention weights."""
    return {name: getattr(config, name) for name in ATTENTION_DROPOUTS if hasattr(config, name)}


@contextmanager
def without_attention_dropout(config: Any) -> Iterator[None]:
    """Turn off the dropout of attention weights in models made from ``config`` inside the block.

    torch's fused attention for CPUs supports no dropout; without fusion, every layer writes all attention
    weights to memory. Compiled layers may get it back (:func:`.optimizer_step.prepare`). Other dropout is
    kept, and ``config`` is restored afterward.
    """
    known = attention_dropouts(config)
    for name in known:
        setattr(config, name, 0.0)
    try:
        yield
    finally:
        for name, value in known.items():
            setattr(config, name, value)


def _new(head: str, texts: Iterable[str], ranks: Ranks, settings: Mapping[str, Any]) -> Loaded:
    from transformers import DistilBertConfig  # noqa: PLC0415 - reads variables when imported

    # Trained once and shared, because the nodes' libraries may differ in details.
    tokenizer = new_tokenizer(ranks.share(train_tokenizer(texts) if ranks.first else None))
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        **SCRATCH_SHAPE,
        **SCRATCH_DROPOUT,
        **settings,
    )
    return Loaded(_auto_class(head).from_config(config), tokenizer)


def save_model(folder: Path, loaded: Loaded) -> None:
    """Write ``model/`` atomically. Raises :class:`TrainingError`."""
    target, partial = folder / "model", folder / ".model.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        for name, value in loaded.own.items():
            setattr(loaded.model.config, name, value)
        if hasattr(loaded.model, "save_pretrained"):
            loaded.model.save_pretrained(partial)
        else:
            partial.mkdir()
            save_weights(loaded.model, str(partial / "model.safetensors"))
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    # safetensors does not raise OSError for a full disk.
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = list_checkpoints(folder)
        again = "there is no checkpoint, so training starts over"
        again = f"it continues from {kept[-1].name}" if kept else again
        raise TrainingError(
            f"{target} can't be written: {first_line(error)}",
            hint=f"free disk space, then use --resume: {again}",
        ) from error


def new_tokenizer(serialized: str) -> Any:
    """Return a fast tokenizer of transformers from the result of :func:`train_tokenizer`."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - reads variables when imported

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(serialized),
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name.strip('[]').lower()}_token": name for name in SPECIAL_TOKENS},
    )


def train_tokenizer(texts: Iterable[str]) -> str:
    """Return a WordPiece tokenizer like BERT's uncased one, as JSON; the same for the same texts."""
    some, room = list[str](), SCRATCH_CHARACTERS
    for text in texts:
        some.append(text[:room])
        room -= len(some[-1])
        if not room:
            break
    tokenizer = _bare_tokenizer(models.WordPiece(_train_vocabulary(some), unk_token="[UNK]"))
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
    # The trainer numbers word-internal characters in the random order of a hash table, which decides
    # ties. As special tokens, they are numbered in a fixed order.
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
