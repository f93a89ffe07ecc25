"""transformers' models with their tokenizers: from a folder, from the hub, or new."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model as save_weights
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

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
MOST_TOKENS = 8192
"""The longest input of models that have no limit."""
SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff"),
)
"""What only models that sample read of a generation config."""
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
ATTENTION_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob")
"""Configuration names of attention dropout: DistilBERT's, and that of BERT and others."""


class ExactLinear(nn.Linear):
    """Computes in fp32, also under autocast: in bf16, all numbers near 2,000 are multiples of 8."""

    def forward(self, values: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(values.float())


def _keep_digits(model: Any) -> None:
    """Compute a model's only output, if it has just one, in fp32: bf16 would make different scores equal."""
    if model.config.get_text_config().num_labels == 1:
        for last in [each for each in model.modules() if type(each) is nn.Linear][-1:]:
            if last.out_features == 1:
                last.__class__ = ExactLinear


def longest_input(loaded: Loaded) -> int | None:
    """Return a model's maximum number of tokens, aligned; ``None`` for no limit."""
    limits = [getattr(loaded.model.config, "max_position_embeddings", None)]
    for name, module in loaded.model.named_modules():
        if first := _first_position(name, module):
            limits.append(len(module.weight) - first)  # I-BERT has its own embedding
    known = [limit for limit in limits if limit and limit > 0]  # XLNet says -1
    return min(known) // ALIGN * ALIGN if known else None


def reading_limit(loaded: Loaded) -> int:
    """Return how many tokens of a text `predict` reads: as many as training, which the tokenizer keeps."""
    limits = loaded.tokenizer.model_max_length, longest_input(loaded) or MOST_TOKENS, MOST_TOKENS
    return int(min(limits))


def _first_position(name: str, module: Any) -> int:
    """Return the first position of a module: in RoBERTa and others, the one after that of the padding."""
    before = getattr(module, "padding_idx", None) if name.endswith("position_embeddings") else None
    return 0 if before is None else before + 1


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
    as :func:`class_settings`; a head for the same classes keeps their order (:func:`classes_of`). A new
    model's tokenizer is trained on ``texts``.
    """
    name = options.model
    if name == SCRATCH:
        loaded = _new(head, texts, ranks, settings)
    else:
        keep = options.attention_dropout == "on"
        loaded = load_pretrained(name, head, settings, keep_dropout=keep)
    settle_padding(loaded)
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
        known = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        order = own_order(known.id2label, [*settings.get("label2id", ())])
        settings = {**settings, **(class_settings(order) if order else {})}
        config = transformers.AutoConfig.from_pretrained(
            source, trust_remote_code=False, **settings
        )
        own = {} if keep_dropout else take_attention_dropouts(config)
        model, found = _auto_class(head, config).from_pretrained(
            source,
            config=config,
            trust_remote_code=False,
            output_loading_info=True,
            # A head for other classes is replaced by a new one.
            ignore_mismatched_sizes=bool(settings),
            **({} if dtype is None else {"dtype": dtype}),
            **choose_attention(config),
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, use_fast=True, trust_remote_code=False
        )
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
    _read_marks_as_text(model, tokenizer)
    if hasattr(model, "sequence_summary") and model.config.summary_type == "last":
        model.register_forward_pre_hook(_pad_left, with_kwargs=True)
    _settle_generation(model)
    # Newer transformers keep the files' type: fp16 would be trained as fp16.
    missing = {*found["missing_keys"]}
    model = model if dtype else model.float()
    replaced = {each[0] for each in found.get("mismatched_keys", ())}
    # A number has no class whose name could differ.
    is_number = known.num_labels == 1 and settings.get("problem_type") == "regression"
    if settings and not order and not is_number:
        replaced |= {*_renew_head(model, missing | replaced)}
    others = tuple(known.id2label.values()) if replaced else ()
    _keep_digits(model)
    return Loaded(model, tokenizer, tuple(sorted(missing | replaced)), own, others)


def _read_marks_as_text(model: Any, tokenizer: Any) -> None:
    """Tokenize "</s>" in a text, as HTML may have it, as other words, for models that count these tokens.

    BART and T5 classify a text at its only "</s>", and Longformer finds a question's end by the first of
    three. If special tokens were added to the vocabulary, such as "[E1]" around a name, all are kept.
    """
    known = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    added = [n for n, each in tokenizer.added_tokens_decoder.items() if each.special and n >= known]
    counts = model.config.is_encoder_decoder or model.config.model_type == "longformer"
    if counts and not added:
        tokenizer.split_special_tokens = True
        tokenizer.init_kwargs["split_special_tokens"] = True  # saved with the tokenizer


def _pad_left(_: Any, args: Any, inputs: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Move padding to the front, for XLNet, which classifies a text at the last place of its row."""
    mask = inputs["attention_mask"]
    places = (torch.arange(mask.shape[1]) + mask.sum(dim=1, keepdim=True)) % mask.shape[1]
    return args, {k: v if k == "labels" else v.gather(1, places) for k, v in inputs.items()}


def _settle_generation(model: Any) -> None:
    """Correct a generation config that transformers loads and would refuse to save after hours of training.

    Vicuna's, for one, has a temperature and does not sample; the saved one has no temperature.
    """
    from transformers import GenerationConfig  # noqa: PLC0415 - reads variables when imported

    if (settings := getattr(model, "generation_config", None)) is None:
        return
    ends = {"bos_token_id": settings.bos_token_id, "eos_token_id": settings.eos_token_id}
    bare, greedy = GenerationConfig(**ends), copy(settings)
    for name in () if settings.do_sample else SAMPLING:
        setattr(greedy, name, getattr(bare, name, None))
    for each in (settings, greedy, bare):
        with suppress(ValueError):  # which names what can't be saved
            each.validate(strict=True)
            model.generation_config = each
            return


def choose_attention(config: Any) -> dict[str, str]:
    """Return the arguments by which transformers 4 also limits the scores of attention, such as Gemma 2's.

    Its fused attention, the default, has no limit.
    """
    is_limited = getattr(config, "attn_logit_softcapping", None) is not None
    return {"attn_implementation": "eager"} if is_limited else {}


def class_settings(names: Sequence[str]) -> dict[str, Any]:
    """Return the classes in the form of a model's configuration."""
    numbers = {name: number for number, name in enumerate(names)}
    return {"num_labels": len(names), "id2label": dict(enumerate(names)), "label2id": numbers}


def classes_of(loaded: Loaded) -> list[str]:
    """Return the names of a model's classes, in its order."""
    return [
        loaded.model.config.id2label[number] for number in range(loaded.model.config.num_labels)
    ]


def own_order(known: Mapping[int, str], names: Sequence[str]) -> list[str]:
    """Return ``names`` in the order of a model's classes; nothing if it has others.

    Upper case does not matter, and LABEL_2 is 2.
    """
    same = {*known.values()} == {*names}

    def key(name: str) -> str:
        return name if same else name.lower().removeprefix("label_")

    found = {key(name): name for name in names}
    order = [found.get(key(known[number]), "") for number in sorted(known)]
    return order if sorted(order) == sorted(names) else []


def _renew_head(model: Any, new: Collection[str]) -> list[str]:
    """Replace the weights of classes other than the data's; return their names."""
    inside = {id(each) for each in model.base_model.parameters()}
    head = {
        name: each.data
        for name, each in model.named_parameters()
        if name not in new
        and id(each) not in inside
        and each.shape[:1] == (model.config.num_labels,)
    }
    for weight in head.values():
        spread = getattr(model.config, "initializer_range", 0.02)
        weight.normal_(0.0, spread) if weight.dim() > 1 else weight.zero_()
    return list(head)


def settle_padding(loaded: Loaded) -> None:
    """Give the model and its tokenizer the same padding token; one without gets one.

    A decoder classifies a text by its last token, which it finds as the last one that is not padding.
    """
    tokenizer, config = loaded.tokenizer, loaded.model.config.get_text_config()
    if tokenizer.pad_token_id is None:
        last = tokenizer("which")["input_ids"][-1]  # may be added to every text
        own, end = getattr(config, "pad_token_id", None), tokenizer.eos_token_id
        ids = (own, end, tokenizer.unk_token_id, tokenizer.bos_token_id, 0, 1)
        fitting = (each for each in ids if each in range(len(tokenizer)) and each != last)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(next(fitting))
    if not any(_first_position(*each) for each in loaded.model.named_modules()):
        config.pad_token_id = tokenizer.pad_token_id


def _auto_class(head: str, config: Any) -> Any:
    import transformers  # noqa: PLC0415

    # AutoModel adds T5's decoder, which needs a text as well.
    has_encoder = type(config) in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING
    bare = "AutoModelForTextEncoding" if has_encoder else "AutoModel"
    return getattr(transformers, f"AutoModelFor{head}" if head else bare)


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
    taken = {*inspect.signature(model.forward).parameters}
    if getattr(model.config, "type_vocab_size", 2) < 2:  # such as YOSO's, whose tokenizer has two
        taken.discard("token_type_ids")
    tokenizer.model_input_names = [each for each in tokenizer.model_input_names if each in taken]


def take_attention_dropouts(config: Any) -> dict[str, float]:
    """Turn off a configuration's dropout of attention weights; return the values that it had.

    torch's fused attention for CPUs supports no dropout; without fusion, every layer writes all attention
    weights to memory. Other dropout is kept.
    """
    own = {name: getattr(config, name) for name in ATTENTION_DROPOUTS if hasattr(config, name)}
    for name in own:
        setattr(config, name, 0.0)
    return own


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
    model = _auto_class(head, config).from_config(config)
    _keep_digits(model)
    return Loaded(model, tokenizer)


def save_model(folder: Path, loaded: Loaded) -> None:
    """Write ``model/`` atomically. Raises :class:`TrainingError`."""
    target = folder / "model"
    try:
        write_model(target, loaded)
    # safetensors does not raise OSError for a full disk.
    except (OSError, SafetensorError) as error:
        kept = list_checkpoints(folder)
        again = "there is no checkpoint, so training starts over"
        again = f"it continues from {kept[-1].name}" if kept else again
        raise TrainingError(
            f"{target} can't be written: {first_line(error)}",
            hint=f"free disk space, then use --resume: {again}",
        ) from error


def write_model(target: Path, loaded: Loaded) -> None:
    """Write a model and its tokenizer atomically. Raises ``OSError`` or ``SafetensorError``."""
    partial = target.with_name(f".{target.name}.partial")
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
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
