"""Attention for compiled layers: batched products, and fused passes over the weights between them.

For short texts, this is up to six times as fast as torch's fused attention for CPUs. For long ones, it keeps
all attention weights in memory, and with AMX it takes up to 1.7 times as long (benchmarks.attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..runtime.precision import read_cpu_flags
from .dropout import HashDropout, keep_mask, same_modes

NAME = "products"
PLAIN = "plain_products"
"""The same attention from plain operations, with transformers' own masks: what others are compared with."""
_CHANGING = ("position_bias", "softcap", "s_aux")
"""Options of transformers' attention that change its results, and that :func:`attend` lacks."""
DROPPED = -(2.0**-64)
"""Factor of dropped weights: too small to change a sum; by the sign, the backward pass knows them."""
LONGEST, LONGEST_CAUSAL = (384, 128) if "amx_bf16" in read_cpu_flags() else (512, 256)
"""Most tokens for which products are used, and the same for language models, whose fused attention skips the
masked half. With AMX, fused attention is as fast at 256 tokens and takes 0.76 of the time at 384, where
SQuAD's features end: too little to pay for compiling a second graph. On Zen 4, without AMX, it takes twice as
long at 256 to 1,024 tokens, and 1.4 to 1.5 times as long in language models up to 512; but the attention
weights of longer texts would take too much memory.
"""


class ProductAttention(torch.autograd.Function):
    """``dropout(softmax(scale * query key^T + mask)) value``, of (batch, heads, tokens, size) each.

    Keys and values may have fewer heads: consecutive heads of the query share them, as rows of one product.

    It keeps the weights in the type of its inputs, where softmax under autocast would keep them in fp32.
    ``seed`` and ``p`` are those of :func:`.dropout.keep_mask`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        seed: Tensor | None,
        p: float,
    ) -> Tensor:
        shape = (*query.shape[:-1], key.shape[-2])
        scores = torch.matmul(_share(query, key), key.transpose(-1, -2)).float() * scale
        scores = scores.view(shape)
        if mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, -1)
        if seed is not None:
            keep = keep_mask(weights.shape, seed, p)
            weights = weights * torch.where(keep, 1 / (1 - p), DROPPED)
        weights = weights.to(query.dtype)
        output = torch.matmul(_share(weights, value), value).view(*shape[:-1], -1)
        ctx.save_for_backward(query, key, value, weights, output)
        ctx.scale, ctx.p = scale, 0.0 if seed is None else p
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, weights, output = ctx.saved_tensors
        # Under autocast, rotary embeddings leave query and key in fp32; backward passes run without it.
        query, key, value, weights = (
            each.to(gradient.dtype) for each in (query, key, value, weights)
        )
        # Of each row: the sum of the weights' gradients times the weights.
        mean = (gradient.float() * output.float()).sum(-1, keepdim=True)
        gradient = _share(gradient, value)
        of_weights = torch.matmul(gradient, value.transpose(-1, -2)).float().view_as(weights)
        before = kept = weights.float()
        if ctx.p:
            before = kept * torch.where(kept < 0, 1 / DROPPED, 1 - ctx.p)
        of_scores = ((kept * of_weights - before * mean) * ctx.scale).to(query.dtype)
        of_scores = _share(of_scores, key)
        return (
            torch.matmul(of_scores, key).view_as(query),
            torch.matmul(of_scores.transpose(-1, -2), _share(query, key)),
            torch.matmul(_share(weights, value).transpose(-1, -2), gradient),
            None,
            None,
            None,
            None,
        )


def _share(values: Tensor, shared: Tensor) -> Tensor:
    """Return the rows of all heads that share keys, or values, as those of one head."""
    if values.shape[1] == shared.shape[1]:
        return values
    return values.reshape(*shared.shape[:2], -1, values.shape[-1])


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    apply: Any = ProductAttention.apply,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the output as (batch, tokens, heads, size), the shape that transformers expects."""
    for name in _CHANGING:
        if options.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    own = find_dropout(module) if 0 < dropout < 1 else None
    is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    causal = attention_mask is None and is_causal and query.shape[-2] > 1
    mask = add_mask(attention_mask)
    fixed = attention_mask is None or not attention_mask.requires_grad
    if query.shape[-2] <= LONGEST and fixed and not causal and (own is not None or not dropout):
        seed = None if own is None else own.next_seed()
        output = apply(query, key, value, mask, scale, seed, dropout)
    else:
        several = query.shape[1] // key.shape[1]
        if several > 1:
            key, value = (each.repeat_interleave(several, dim=1) for each in (key, value))
        output = scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, causal, scale=scale
        )
    if is_causal and mask is not None:
        # Padding on the left attends to no token. Softmax would give it the mean of all, with later ones, and
        # the first word is predicted from it.
        sees = mask.amax(-1, keepdim=True) > torch.finfo(mask.dtype).min / 2
        output = torch.where(sees, output, 0.0)
    return output.transpose(1, 2), None


def add_mask(mask: Tensor | None) -> Tensor | None:
    """Return a mask as values to add to the scores. Those of Boolean masks say what takes part."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


def _apply_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    seed: Tensor | None,
    p: float,
) -> Tensor:
    """Compute :class:`ProductAttention` as its docstring says it."""
    several = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(several, dim=1) for each in (key, value))
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    if seed is not None:
        weights = weights * keep_mask(weights.shape, seed, p) / (1 - p)
    return torch.matmul(weights.to(value.dtype), value)


def attend_plainly(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
    """Compute :func:`attend` with plain operations."""
    return attend(*arguments, **{**options, "apply": _apply_plainly})


def find_dropout(module: Any) -> HashDropout | None:
    """Return a layer's dropout of attention weights, by its names in BERT, ALBERT, GPT-2, and others."""
    for name in ("dropout", "attention_dropout", "attn_dropout"):
        found = getattr(module, name, None)
        if isinstance(found, HashDropout):
            return found
    return None


def use_products(model: Any) -> list[Any]:
    """Let a model's layers use :func:`attend`; return the modules that do.

    None do if transformers or the model can't switch attention, or if the outputs for a small batch would
    differ.
    """
    if not hasattr(model, "set_attn_implementation"):
        return []
    try:
        from transformers import (  # noqa: PLC0415 - reads variables when imported
            AttentionInterface,
            logging,
        )
        from transformers.masking_utils import (  # noqa: PLC0415 - not in older releases
            AttentionMaskInterface,
            eager_mask,
            sdpa_mask,
        )
    except ImportError:
        return []
    using: list[Any] = []

    def attend_and_note(module: Any, *arguments: Any, **options: Any) -> Any:
        using.append(module)
        return attend(module, *arguments, **options)

    def always_mask(*arguments: Any, **options: Any) -> Any:
        """Return a mask also for a batch without padding: without one, layers would be compiled again.

        Language models' long batches have none: the fused attention then skips what is masked.
        """
        if options.get("q_length", 0) > LONGEST_CAUSAL and options.get("allow_is_causal_skip"):
            return add_mask(sdpa_mask(*arguments, **options))
        return eager_mask(*arguments, **{**options, "allow_is_bidirectional_skip": False})

    # Older releases warn about models that can't switch.
    logging.set_verbosity_error()
    AttentionInterface.register(NAME, attend_and_note)
    AttentionMaskInterface.register(NAME, always_mask)
    AttentionInterface.register(PLAIN, attend_plainly)
    AttentionMaskInterface.register(PLAIN, eager_mask)
    before = model.config._attn_implementation
    # Models' arguments and errors differ; training works without it.
    with suppress(Exception):
        model.set_attn_implementation(NAME)
        _outputs(model, 8, [])
        AttentionInterface.register(NAME, attend)
        modules = list(dict.fromkeys(using))
        found = [_outputs(model, width, modules) for width in _widths(model)]
        model.set_attn_implementation(before)
        expected = [_outputs(model, width, modules) for width in _widths(model)]
        most = 1e-3 if model.dtype == torch.float32 else 0.03  # a model below adapters
        pairs = zip(chain(*found), chain(*expected))  # noqa: B905 - 3.8
        if modules and all((a - b).norm() <= most * b.norm() for a, b in pairs):
            model.set_attn_implementation(NAME)
            return modules
    model.set_attn_implementation(before)
    return []


def stop_using_products(model: Any, before: str | None = None) -> None:
    """Undo :func:`use_products`."""
    if getattr(getattr(model, "config", None), "_attn_implementation", "") in (NAME, PLAIN):
        model.set_attn_implementation(before or "sdpa")


def _widths(model: Any) -> list[int]:
    """Return numbers of tokens on both sides of each limit that the model can take.

    For each, about eight texts of that length are computed without a backward pass.
    """
    window = getattr(model.config, "sliding_window", None) or 0
    most = getattr(model.config, "max_position_embeddings", None) or LONGEST + 9
    limits = (16, LONGEST_CAUSAL, LONGEST, window if window < LONGEST else 0)
    widths = {each + more for each in limits if each for more in (0, 9)}
    return sorted(each for each in widths if each <= min(most - 2, LONGEST + 9)) or [8]


def _outputs(model: Any, width: int, modules: Sequence[Any]) -> list[Tensor]:
    """Return what ``modules`` and the last layer return for texts padded right, left, and not at all."""
    ids = 3 + torch.arange(3 * width).view(3, width) * 7 % (model.config.vocab_size - 3)
    mask = torch.ones_like(ids)
    mask[1, width // 2 :] = 0
    mask[2, : width // 3] = 0
    returned: list[Tensor] = []

    def note(_: Any, __: Any, output: Any) -> None:
        returned.append(output[0] if isinstance(output, tuple) else output)

    hooks = [each.register_forward_hook(note) for each in modules]
    try:
        with torch.no_grad(), same_modes(model):
            model.eval()
            for rows in (slice(None), slice(1), slice(1, 2)):
                inputs = {"input_ids": ids[rows], "attention_mask": mask[rows]}
                if model.config.is_encoder_decoder:
                    inputs.update({f"decoder_{name}": each for name, each in inputs.items()})
                note(None, None, model.base_model(**inputs)[0])
                kept = mask[rows] == 1
                whole = len(modules) + 1
                returned[-whole:] = [each[kept].float() for each in returned[-whole:]]
    finally:
        for hook in hooks:
            hook.remove()
    return returned
