"""Small tokenizers like those of the well-known model families."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def bert(texts: Sequence[str]) -> Any:
    """WordPiece, [CLS] A [SEP] B [SEP], two token types."""
    from jobs.worker.training.model import new_tokenizer, train_tokenizer

    tokenizer = new_tokenizer(train_tokenizer(texts))
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def roberta(texts: Sequence[str]) -> Any:
    """Bytes, <s> A </s></s> B </s>, offsets without the blank before a word."""
    from tokenizers.processors import RobertaProcessing

    raw = _bytes(texts)
    raw.post_processor = RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets=True)
    return _wrap(raw)


def gpt2(texts: Sequence[str]) -> Any:
    """Bytes, no special token at all."""
    return _wrap(_bytes(texts))


def xlnet(texts: Sequence[str]) -> Any:
    """Pieces of a unigram model, A </s> B </s> <s>, three token types."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from tokenizers.processors import TemplateProcessing

    raw = Tokenizer(models.Unigram())
    raw.normalizer = normalizers.NFKD()
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<s>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=specials, unk_token="<unk>", show_progress=False
    )
    raw.train_from_iterator(texts, trainer)
    raw.post_processor = TemplateProcessing(
        single="$A </s> <s>:2",
        pair="$A </s> $B:1 </s>:1 <s>:2",
        special_tokens=[("<s>", 0), ("</s>", 1)],
    )
    return _wrap(raw, ["input_ids", "token_type_ids", "attention_mask"])


def _bytes(texts: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    raw.post_processor = processors.ByteLevel(trim_offsets=False)
    return raw


def _wrap(raw: Any, inputs: Sequence[str] = ("input_ids", "attention_mask")) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=raw, model_input_names=list(inputs), pad_token="<s>"
    )


KINDS: dict[str, Callable[[Sequence[str]], Any]] = {
    "bert": bert,
    "roberta": roberta,
    "gpt2": gpt2,
    "xlnet": xlnet,
}
