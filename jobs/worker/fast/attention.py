"""Attention for compiled layers: batched products, and fused passes over the weights between them.

For short texts, this is up to six times as fast as torch's fused attention for CPUs. For long ones, it takes
up to 1.7 times as long, and keeps all attention weights in memory (benchmarks.attention).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from .dropout import HashDropout, keep_mask

NAME = "products"
DROPPED = -(2.0**-64)
"""Factor of dropped weights: too small to change a sum; by the sign, the backward pass knows them."""
Dropout = TypeVar("Dropout", bound=nn.Module)
LONGEST = 384
"""Most tokens for which products are used. Fused attention is as fast at 256 tokens and takes 0.76 of the
time at 384, where SQuAD's features end: too little to pay for compiling a second graph."""
LONGEST_CAUSAL = 128
"""The same for language models: fused attention skips the masked half."""


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
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the output as (batch, tokens, heads, size), the shape that transformers expects."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    own = find_dropout(module, HashDropout) if dropout else None
    causal = attention_mask is None and getattr(module, "is_causal", False)
    if query.shape[-2] <= LONGEST and not causal and (own is not None or not dropout):
        seed = None if own is None else own.next_seed()
        output = ProductAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, attention_mask, scale, seed, dropout
        )
    else:
        several = query.shape[1] // key.shape[1]
        if several > 1:
            key, value = (each.repeat_interleave(several, dim=1) for each in (key, value))
        output = scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, causal, scale=scale
        )
    return output.transpose(1, 2), None


def find_dropout(module: Any, kind: type[Dropout]) -> Dropout | None:
    """Return a layer's dropout of attention weights, by its names in BERT, ALBERT, and others."""
    for name in ("dropout", "attention_dropout"):
        found = getattr(module, name, None)
        if isinstance(found, kind):
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
            return sdpa_mask(*arguments, **options)
        return eager_mask(*arguments, **{**options, "allow_is_bidirectional_skip": False})

    # Older releases warn about models that can't switch.
    logging.set_verbosity_error()
    AttentionInterface.register(NAME, attend_and_note)
    AttentionMaskInterface.register(NAME, always_mask)
    before = model.config._attn_implementation
    # Models' arguments and errors differ; training works without it.
    with suppress(Exception):
        expected = _outputs(model)
        model.set_attn_implementation(NAME)
        found = _outputs(model)
        AttentionInterface.register(NAME, attend)
        if using and _are_equal(found, expected):
            return list(dict.fromkeys(using))
    model.set_attn_implementation(before)
    return []


def _are_equal(found: Tensor, expected: Tensor) -> bool:
    if expected.dtype == torch.bfloat16:  # a model below adapters
        difference = (found - expected).float().norm()
        return bool(difference < 0.03 * expected.float().norm())
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


def stop_using_products(model: Any) -> None:
    """Undo :func:`use_products`."""
    if getattr(getattr(model, "config", None), "_attn_implementation", "") == NAME:
        model.set_attn_implementation("sdpa")


def _outputs(model: Any) -> Tensor:
    """Return the last layer's outputs for two short texts, one of them padded."""
    ids = torch.arange(3, 35).view(2, 16) % model.config.vocab_size
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    training = model.training
    model.eval()
    with torch.no_grad():
        outputs: Tensor = model.base_model(input_ids=ids, attention_mask=mask)[0]
    model.train(training)
    return outputs[mask == 1]
