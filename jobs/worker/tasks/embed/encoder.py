"""The model of `train embed`: one encoder for all columns, and the loss of its vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, pad

from ...runtime.errors import ModelError
from ...runtime.ranks import Ranks

_SENTENCE_TRANSFORMERS: dict[str, Any] = {
    "modules.json": [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(
            [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        )
    ],
    "2_Normalize/config.json": {},
}
"""Files with which sentence-transformers computes the same vectors."""


_POOLING, _SETTINGS = "1_Pooling/config.json", "config_sentence_transformers.json"
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def read_declared(model: Any) -> dict[str, dict[str, Any]]:
    """Return what the files of a model of sentence-transformers say about pooling and prompts, by file."""
    from transformers.utils import cached_file

    found = {}
    for name in (_POOLING, _SETTINGS):
        path = model.name_or_path and cached_file(
            model.name_or_path,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        found[name] = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    return found


def find_pooling(declared: dict[str, dict[str, Any]]) -> str:
    """Return "mean" or "cls". Raises :class:`ModelError` for another pooling."""
    pooling = declared[_POOLING]
    old = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value]
    mode = pooling.get("pooling_mode", [_MODES.get(name, name) for name in old] or "mean")
    mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
    if mode not in ("mean", "cls"):
        raise ModelError(f"the model's pooling is {mode!r}; `embed` has mean and cls")
    return str(mode)


def pool(states: Tensor, mask: Tensor, pooling: str = "mean") -> Tensor:
    """Return each text's vector, with length 1, from its last hidden states, (texts, tokens, size)."""
    if pooling == "cls":
        return normalize(states[:, 0].float(), dim=-1)
    kept = mask.unsqueeze(-1).float()
    return normalize((states.float() * kept).sum(1) / kept.sum(1), dim=-1)


class BiEncoder(nn.Module):
    """Encodes the columns of a batch, each at its own width. Everything else is the encoder's."""

    def __init__(self, encoder: Any, max_length: int) -> None:
        super().__init__()
        self.encoder, self._max_length = encoder, max_length
        self._declared = read_declared(encoder)
        self.pooling = find_pooling(self._declared)

    def __getattr__(self, name: str) -> Any:
        if name == "encoder":
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.encoder, name)

    def forward(self, shapes: Tensor, **flat: Tensor) -> Tensor:
        """Return vectors, shape (columns, samples, size).

        ``shapes`` has a row (samples, tokens) for each column; the columns' inputs are one after the other
        in each tensor of ``flat``.
        """
        vectors, at = [], 0
        for rows, width in shapes.tolist():
            part = {name: each[at : at + rows * width] for name, each in flat.items()}
            vectors.append(self.encode(**{k: v.view(rows, width) for k, v in part.items()}))
            at += rows * width
        return torch.stack(vectors)

    def encode(self, **inputs: Tensor) -> Tensor:
        """Return the vectors of one column's texts."""
        return pool(self.encoder(**inputs)[0], inputs["attention_mask"], self.pooling)

    def save_pretrained(self, folder: Path) -> None:
        """Save the encoder as transformers does, with what sentence-transformers needs."""
        self.encoder.save_pretrained(folder)
        size = self.encoder.config.hidden_size
        files = {
            **_SENTENCE_TRANSFORMERS,
            "sentence_bert_config.json": {"max_seq_length": self._max_length},
            _SETTINGS: {"similarity_fn_name": "cosine", **self._declared[_SETTINGS]},
            _POOLING: self._declared[_POOLING]
            or {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True},
        }
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def contrast(vectors: Tensor, ids: Tensor, temperature: float, ranks: Ranks) -> Tensor:
    """Return the mean loss of this rank's samples: each anchor has to find its positive.

    The candidates are the positives and negatives of all samples on all ranks. ``vectors`` has shape
    (columns, samples, size): anchors, positives, and perhaps negatives; ``ids``, (columns, samples), is equal
    for equal texts. A candidate that is right for another reason doesn't count: one with the positive's
    text, or the positive of an equal anchor. This is InfoNCE, https://arxiv.org/abs/1807.03748.
    """
    anchors = vectors[0]
    counts = _counts(anchors.shape[0], ranks)
    found = _Gather.apply(vectors[1:].transpose(0, 1), counts, ranks)  # type: ignore[no-untyped-call]
    known = _gather(ids.T.contiguous(), counts, ranks)
    candidates = found.transpose(0, 1).flatten(0, 1)
    right = sum(counts[: ranks.rank]) + torch.arange(len(anchors))
    is_same = known[:, 1:].T.flatten() == ids[1][:, None]
    is_same[:, : len(known)] |= known[:, 0] == ids[0][:, None]
    is_same[torch.arange(len(anchors)), right] = False
    with torch.autocast("cpu", enabled=False):  # bf16 has too few digits for similarities
        scores = anchors @ candidates.T / temperature
    return cross_entropy(scores.masked_fill(is_same, float("-inf")), right)


def _counts(count: int, ranks: Ranks) -> list[int]:
    """Return every rank's number of samples: with fewer ranks than planned, they differ."""
    if ranks.size == 1:
        return [count]
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.size)]
    dist.all_gather(counts, torch.tensor([count]), group=ranks.control)
    return [int(each) for each in counts]


def _gather(rows: Tensor, counts: list[int], ranks: Ranks) -> Tensor:
    """Return all ranks' rows, in rank order."""
    if ranks.size == 1:
        return rows
    most = max(counts)
    # All ranks have to send the same size.
    own = pad(rows, (0, 0) * (rows.dim() - 1) + (0, most - len(rows))).contiguous()
    found = [torch.empty_like(own) for _ in counts]
    dist.all_gather(found, own, group=ranks.control)
    return torch.cat([each[:count] for each, count in zip(found, counts)])  # noqa: B905 - 3.8


class _Gather(torch.autograd.Function):
    """:func:`_gather`, with the gradients that all ranks' losses have for this rank's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], ranks: Ranks) -> Tensor:
        ctx.counts, ctx.ranks = counts, ranks
        return _gather(rows.contiguous(), counts, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone(memory_format=torch.contiguous_format)
        if ctx.ranks.size > 1:
            dist.all_reduce(total, group=ctx.ranks.control)
        first = sum(ctx.counts[: ctx.ranks.rank])
        return total[first : first + ctx.counts[ctx.ranks.rank]], None, None
