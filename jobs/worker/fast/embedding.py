"""Training without the embeddings of words that the training data lack.

Those never get a gradient, so AdamW never changes them, except by weight decay, from which this exempts them.
Leaving them out otherwise changes only how the gradients' norm is rounded. It saves their gradients, their
optimizer state, and the passes over them: with a multilingual model, most of all parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from .dropout import replace_modules


class UsedEmbedding(nn.Embedding):
    """The rows ``used`` of a table, in its place; ``used`` are ascending IDs, shape (rows,).

    Outside training, it is the whole table, with the rows as trained so far.
    """

    def __init__(self, table: nn.Embedding, used: Tensor) -> None:
        super().__init__(len(used), table.embedding_dim, _weight=table.weight.detach()[used])
        # In a tuple: as a plain attribute, it would be registered.
        self._table, self._used = (table,), used
        self.row = torch.full((table.num_embeddings,), len(used))
        """Each word's row here. Words without one have an invalid row, so that their lookup fails."""
        self.row[used] = torch.arange(len(used))
        if table.padding_idx is not None:
            # Its row gets no gradients.
            self.padding_idx = int(self.row[table.padding_idx])

    def forward(self, ids: Tensor) -> Tensor:
        if not self.training:
            whole: Tensor = self.restored()(ids)
            return whole
        return super().forward(self.row[ids])

    def restored(self) -> nn.Embedding:
        """Return the table with the rows as trained so far."""
        (table,) = self._table
        with torch.no_grad():
            table.weight[self._used] = self.weight
        return table


def word_table(model: Any) -> nn.Embedding | None:
    """Return the trained word embeddings, or None if another layer shares them."""
    table = None
    with suppress(AttributeError, NotImplementedError):  # transformers' models of texts have it
        table = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding) or not table.weight.requires_grad:
        return None
    # Shared with another layer, as in language models, every row gets gradients.
    owners = [
        name
        for name, each in model.named_parameters(remove_duplicate=False)
        if each is table.weight
    ]
    return table if len(owners) == 1 else None


def train_used_words(model: Any, words: Iterable[int]) -> None:
    """Train only the embeddings of these token IDs and of padding, until :func:`restore_words`.

    Tables with other features than padding keep all rows.
    """
    table = word_table(model)
    if type(table) is not nn.Embedding:
        return
    if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
        return
    used = torch.zeros(table.num_embeddings, dtype=torch.bool)
    used[torch.tensor([*words])] = True
    if table.padding_idx is not None:
        used[table.padding_idx] = True
    if not used.all():
        rows = used.nonzero().squeeze(1)
        replace_modules(model, lambda each: each is table, lambda each: UsedEmbedding(each, rows))


def restore_words(model: nn.Module) -> None:
    """Undo :func:`train_used_words`; the table has the trained embeddings."""
    replace_modules(
        model, lambda each: isinstance(each, UsedEmbedding), lambda each: each.restored()
    )
