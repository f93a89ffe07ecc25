"""The loss of a language model, some tokens at a time.

Computed at once, the logits would be a batch's largest tensor: with 8 samples of 1,024 tokens and 128,000
words, 4 GB, and as much again for their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

IGNORED = -100
"""The label of padding."""
CHUNK, LEAST_ROWS = 1 << 25, 256
"""Most logits that are computed together, 67 MB in bf16, but those of so many tokens at least."""
BLOCK_ROWS = 8
"""Tokens of a block, for each thread: its shares, 1.6 MB in fp32 with 49,152 words, stay in the caches."""
SMALLEST = 1e-38
"""Less counts as this much: the loss of a token is at most 87."""


def _rows(weight: Tensor) -> int:
    """Return the tokens of a chunk: a power of two, since products of other numbers of rows can take longer.

    Without AMX, those of 682 rows take 1.2 times as long for each row as those of 512.
    """
    return max(LEAST_ROWS, 1 << (CHUNK // len(weight)).bit_length() - 1)


class ChunkedLoss(torch.autograd.Function):
    """The mean cross entropy of ``hidden weight^T`` over the labels that are not :data:`IGNORED`.

    Shapes: ``hidden`` (tokens, size), ``weight`` (words, size), ``labels`` (tokens). The forward pass
    computes the gradients, chunk by chunk, so that no logits are kept.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        values, table = _same_type(hidden, weight)
        kept = labels != IGNORED
        count = kept.sum().clamp(min=1)
        wanted = labels.clamp(min=0).unsqueeze(1)
        of_hidden = torch.empty_like(values) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            # Transposed: with AMX, products with a transposed first operand take 1.5 times as long.
            of_weight = torch.zeros(weight.shape[::-1], dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32)
        for part in parts(len(values), _rows(weight)):
            mask = kept[part].unsqueeze(1)
            logits = values[part] @ table.t()
            logs = _replace_by_gradients(logits, wanted[part])
            total -= (logs * mask).sum()
            if of_hidden is not None:
                of_hidden[part] = (logits @ table) * mask
            if of_weight is not None:
                of_weight += (values[part] * mask).t().contiguous() @ logits
        ctx.save_for_backward(of_hidden, of_weight, count)
        ctx.types = hidden.dtype, weight.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_hidden, of_weight, count = ctx.saved_tensors
        scale = gradient / count
        # In place: they are not needed again.
        of_hidden, of_weight = (
            None if each is None else each.mul_(scale).to(dtype)
            for each, dtype in zip((of_hidden, of_weight), ctx.types)  # noqa: B905 - 3.8
        )
        return of_hidden, None if of_weight is None else of_weight.t(), None


def _replace_by_gradients(logits: Tensor, wanted: Tensor) -> Tensor:
    """Replace the logits of each token by the gradients of its loss; return the losses, negated.

    Only a few tokens at a time are in fp32, so that they stay in the processor's caches.
    """
    rows, found = BLOCK_ROWS * torch.get_num_threads(), []
    for part in parts(len(logits), rows):
        shares = torch.softmax(logits[part], -1, dtype=torch.float32)
        found.append(shares.gather(1, wanted[part]).clamp(min=SMALLEST).log())
        logits[part] = shares.scatter_add_(1, wanted[part], -torch.ones_like(found[-1]))
    return torch.cat(found)


def _same_type(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in the type of autocast or, without it, of ``hidden``."""
    dtype = hidden.dtype
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    return hidden.detach().to(dtype), weight.detach().to(dtype)


def parts(count: int, rows: int) -> list[slice]:
    """Return the places of so many things, at most ``rows`` in each part."""
    return [slice(first, first + rows) for first in range(0, count, rows)]


def use_chunks(model: Any) -> bool:
    """Let a model of transformers compute its loss in chunks; return whether it does.

    Its head then returns its input, which the model calls logits, and its loss function applies the
    head. Some models have a bias, or change logits after the head: these keep their own loss. Whether
    they change them is seen from a tiny batch.
    """
    head = model.get_output_embeddings()
    kind: Any = type(head)
    if kind is not nn.Linear or head.bias is not None or not hasattr(model, "loss_function"):
        return False
    if not _passes_on_logits(model, head):
        return False

    def loss_function(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
        hidden, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss: Tensor = ChunkedLoss.apply(hidden, head.weight, wanted)  # type: ignore[no-untyped-call]
        return loss

    head.forward = _pass
    model.loss_function = loss_function
    return True


def _pass(hidden: Tensor) -> Tensor:
    return hidden


def _passes_on_logits(model: Any, head: Any) -> bool:
    """Return whether a model passes on what its head returns, to its user and to its loss function.

    Large values, because some models cap them.
    """
    returned: list[Tensor] = []
    ids = torch.arange(8).view(1, 8) % head.out_features

    def grow(hidden: Tensor) -> Tensor:
        returned.append(head.weight.new_full((1, 8, 4), 100.0) + hidden.mean())
        return returned[-1]

    def see(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        passed.append(logits)
        return logits.sum()

    passed: list[Tensor] = []
    own, training = model.loss_function, model.training
    head.forward, model.loss_function = grow, see
    try:
        with torch.no_grad():
            output = model.eval()(input_ids=ids, labels=ids, use_cache=False)
        seen = (output.logits, *passed)
        # Tensors without content can't be compared, which is an error.
        same = (each is returned[0] or torch.equal(each, returned[0]) for each in seen)
        return len(seen) == 2 and all(same)
    # Models' arguments and errors differ.
    except Exception:
        return False
    finally:
        del head.forward
        model.loss_function = own
        model.train(training)


@torch.inference_mode()
def token_losses(model: Any, ids: Tensor) -> Tensor:
    """Return the loss of every token but the first, shape (samples, tokens - 1)."""
    head = model.get_output_embeddings()
    outputs = model.eval()(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    wanted, losses = ids[:, 1:].flatten(), []
    table = None
    if "forward" in vars(head):  # in chunks
        outputs, table = _same_type(outputs, head.weight)
    for part in parts(len(outputs), _rows(head.weight)):
        logits = outputs[part] if table is None else outputs[part] @ table.t()
        losses.append(cross_entropy(logits.float(), wanted[part], reduction="none"))
    return torch.cat(losses).view(len(ids), -1)
