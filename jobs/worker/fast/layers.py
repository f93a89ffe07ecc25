"""A model's layers by depth, from its embeddings to its head: which are frozen, and how fast each learns."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..runtime.errors import ModelError

EMBEDDINGS = "embeddings"


def number_layers(model: Any) -> tuple[dict[nn.Parameter, int], int]:
    """Return each parameter's depth, and that of the head: one more than the number of layers.

    The embeddings have depth 0, the n-th layer n. Layers are those of the model's longest lists of modules,
    so an encoder's and a decoder's have the same numbers. What is defined before them, and each table,
    belongs to the embeddings.
    """
    lists = [list(each) for each in model.modules() if isinstance(each, nn.ModuleList)]
    count = max(map(len, lists), default=0)
    depths: dict[nn.Parameter, int] = {}
    for layers in lists:
        for number, layer in enumerate(layers if len(layers) == count else (), start=1):
            for each in layer.parameters():
                depths.setdefault(each, number)  # a layer may have a list of as many modules
    tables = {
        p for each in model.modules() if isinstance(each, nn.Embedding) for p in each.parameters()
    }
    found, before = {}, count > 0
    for each in model.parameters():
        before = before and each not in depths
        found[each] = depths.get(each, 0 if before or each in tables else count + 1)
    return found, count + 1


def freeze_layers(model: Any, frozen: str | None) -> None:
    """Freeze the embeddings and, if ``frozen`` is a number, as many of the first layers.

    Raises :class:`ModelError` if the model has fewer layers, or if nothing would be trained.
    """
    if frozen is None:
        return
    (depths, head), least = number_layers(model), 0 if frozen == EMBEDDINGS else int(frozen)
    if least >= head:
        raise ModelError(
            f"--freeze-layers {frozen} is more than the model's layers: {head - 1}",
            hint=f"use --freeze-layers {head - 1} or less",
        )
    for each, depth in depths.items():
        if depth <= least:
            each.requires_grad_(False)
    if not any(each.requires_grad for each in depths):
        raise ModelError(
            f"--freeze-layers {frozen} leaves nothing to train", hint="freeze fewer layers"
        )
