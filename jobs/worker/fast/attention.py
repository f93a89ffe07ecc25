"""Attention for compiled layers: batched products, and fused passes over the weights between them.

For short texts, this is up to six times as fast as torch's fused attention for CPUs. For long ones, it takes
up to 1.7 times as long, and keeps all attention weights in memory (benchmarks.attention).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .dropout import HashDropout, keep_mask

NAME = "products"
DROPPED = -(2.0**-64)
"""Factor of dropped weights. What they add to a sum is lost in rounding, and the backward pass finds them."""
LONGEST = 384
"""Most tokens for which products are used. Fused attention is as fast at 256 tokens and takes 0.76 of the
time at 384, where SQuAD's features end: too little to pay for compiling a second graph."""


class ProductAttention(torch.autograd.Function):
    """``dropout(softmax(scale * query key^T + mask)) value``, of (batch, heads, tokens, size) each.

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
        scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale
        if mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, -1)
        if seed is not None:
            keep = keep_mask(weights.shape, seed, p)
            weights = weights * torch.where(keep, 1 / (1 - p), DROPPED)
        weights = weights.to(query.dtype)
        output = torch.matmul(weights, value)
        ctx.save_for_backward(query, key, value, weights, output)
        ctx.scale, ctx.p = scale, p
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, weights, output = ctx.saved_tensors
        # Of each row: the sum of the weights' gradients times the weights.
        mean = (gradient.float() * output.float()).sum(-1, keepdim=True)
        of_weights = torch.matmul(gradient, value.transpose(-1, -2)).float()
        before = kept = weights.float()
        if ctx.p:
            before = kept * torch.where(kept < 0, 1 / DROPPED, 1 - ctx.p)
        of_scores = ((kept * of_weights - before * mean) * ctx.scale).to(query.dtype)
        return (
            torch.matmul(of_scores, key),
            torch.matmul(of_scores.transpose(-1, -2), query),
            torch.matmul(weights.transpose(-1, -2), gradient),
            *(None, None, None, None),
        )


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
    own = _find_dropout(module) if dropout else None
    if query.shape[-2] <= LONGEST and (own or not dropout):
        seed = own.next_seed() if own else None
        output = ProductAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, attention_mask, scale, seed, dropout
        )
    else:
        output = scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, scale=scale
        )
    return output.transpose(1, 2), None


def _find_dropout(module: Any) -> HashDropout | None:
    """Return the dropout of weights in a layer's attention, by the names in BERT, ALBERT, and others."""
    for name in ("dropout", "attention_dropout"):
        found = getattr(module, name, None)
        if isinstance(found, HashDropout):
            return found
    return None


def use_products(model: Any) -> bool:
    """Let a model's layers use :func:`attend`; return whether they do.

    They do not if transformers or the model can't switch attention, or if the outputs for a small batch
    would differ.
    """
    try:
        from transformers import (  # noqa: PLC0415 - reads variables when imported
            AttentionInterface,
            logging,
        )
        from transformers.masking_utils import (  # noqa: PLC0415 - not in older releases
            AttentionMaskInterface,
            eager_mask,
        )
    except ImportError:
        return False

    def always_mask(*arguments: Any, **options: Any) -> Any:
        """Return a mask also for a batch without padding: without one, layers would be compiled again."""
        return eager_mask(*arguments, **{**options, "allow_is_bidirectional_skip": False})

    # Older releases warn about models that can't switch.
    logging.set_verbosity_error()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, always_mask)
    before = model.config._attn_implementation
    # Models' arguments and errors differ; training works without it.
    with suppress(Exception):
        expected = _answers(model)
        model.set_attn_implementation(NAME)
        used = model.config._attn_implementation == NAME
        if used and torch.allclose(_answers(model), expected, rtol=1e-3, atol=1e-4):
            return True
    model.set_attn_implementation(before)
    return False


def stop_using_products(model: Any) -> None:
    """Undo :func:`use_products`."""
    if getattr(getattr(model, "config", None), "_attn_implementation", "") == NAME:
        model.set_attn_implementation("sdpa")


def _answers(model: Any) -> Tensor:
    """Return the scores of start and end for two short features, one of them padded."""
    ids = torch.arange(3, 35).view(2, 16) % model.config.vocab_size
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    training = model.training
    model.eval()
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask)
    model.train(training)
    return torch.stack([found.start_logits, found.end_logits])[:, mask == 1]
