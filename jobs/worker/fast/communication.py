"""Gradient averaging: in bf16, half the bytes of fp32, while the backward pass still runs.

Of the word embeddings, a third of DistilBERT whose gradients come last, only the rows of words that some
rank has seen are sent.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .all_reduce import SumOverRanks, sum_in_ring

BUCKET_MB = 5
"""Size in fp32 of the groups in which DistributedDataParallel sends gradients. Its default of 25 holds back
most of the first layer's, whose transfer nothing hides, until the last of them is known."""


class Replica(DistributedDataParallel):
    """This rank's replica of the model, which all ranks train together.

    ``wire`` is the type of gradients on the network, ``control`` a group for small messages, and
    ``all_reduce`` adds up the gradients.
    ``sent_bytes`` counts the bytes of all gradients that this rank has sent; ``last_sent`` is the time
    (``time.perf_counter``) at which the backward pass had its last gradients ready.

    :meth:`average_words`, to be called after ``backward``, averages the word embeddings.
    DistributedDataParallel averages the rest; its own bf16 hook refuses gloo.
    """

    def __init__(
        self,
        model: nn.Module,
        wire: torch.dtype,
        control: Any = None,
        all_reduce: SumOverRanks = sum_in_ring,
    ) -> None:
        words = word_embeddings(model)
        ignored = [name for name, each in model.named_parameters() if each is words]
        # The documented way to exclude a parameter, despite the underscore.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            model, ignored
        )
        super().__init__(model, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB)
        if words is not None:
            # As DistributedDataParallel does with the other parameters.
            dist.broadcast(words.data, 0, group=control)
        # In a tuple: as an attribute, it would be listed twice among the parameters.
        self._words = (words,)
        self.wire, self.control, self._all_reduce = wire, control, all_reduce
        self.last_sent, self.sent_bytes = 0.0, 0
        # It refuses a function with other annotations than its own types; a lambda has none.
        self.register_comm_hook(None, lambda _, bucket: self._send(bucket))

    def _send(self, bucket: Any) -> Future[Tensor]:
        """Start to average a group of gradients, for DistributedDataParallel."""
        gradients = bucket.buffer()
        self.last_sent = time.perf_counter()

        def receive(done: Future[Tensor]) -> Tensor:
            averaged: Tensor = gradients.copy_(done.value())
            return averaged

        return self._average(gradients).then(receive)

    def _average(self, gradients: Tensor) -> Future[Tensor]:
        """Start to average a vector over all ranks."""
        sent = (gradients / dist.get_world_size()).to(self.wire)
        self.sent_bytes += sent.nbytes
        return self._all_reduce(sent)

    def announce(self, ids: Tensor) -> SeenWords | None:
        """Start to exchange which words the ranks have in this step; None without word embeddings."""
        (words,) = self._words
        if words is None:
            return None
        seen = torch.zeros(len(words), dtype=torch.uint8)
        seen[ids.flatten()] = 1
        work = dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.control, async_op=True)
        return SeenWords(seen, work)

    def average_words(self, announced: SeenWords) -> None:
        """Average the gradients of the embeddings that any rank has seen."""
        (words,) = self._words
        assert words is not None
        gradient = words.grad
        assert gradient is not None, "the word embeddings took part in the backward pass"
        announced.work.wait()
        rows = announced.seen.nonzero().squeeze(1)
        # In groups as large as the others, so that the stages of a sum work at the same time.
        size = BUCKET_MB * 2**20 // gradient.element_size()
        groups = torch.split(gradient[rows].flatten(), size)
        averaged = torch.cat([each.wait() for each in [self._average(group) for group in groups]])
        gradient[rows] = averaged.view(len(rows), -1).to(gradient.dtype)


class SeenWords:
    """The words of all ranks: ``seen`` has a 1 for each of them once ``work`` is done."""

    def __init__(self, seen: Tensor, work: Any) -> None:
        self.seen, self.work = seen, work


def word_embeddings(model: nn.Module) -> Tensor | None:
    """Return the word embeddings, or None if another layer shares them."""
    find = getattr(model, "get_input_embeddings", None)  # models of transformers have it
    table = find() if find else None
    if not isinstance(table, nn.Embedding) or not table.weight.requires_grad:
        return None
    # Shared with another layer, as in language models, every row gets gradients.
    owners = [
        name
        for name, each in model.named_parameters(remove_duplicate=False)
        if each is table.weight
    ]
    return table.weight if len(owners) == 1 else None
