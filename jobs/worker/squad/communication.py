"""How the ranks come to the same gradients: averaged in bf16 while the backward pass still runs.

Half of the bytes of fp32 travel. For the table of word vectors, which is a third of DistilBERT and
whose gradients are the last to be known, only the rows of words that some rank has seen.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

BUCKET_MB = 25
"""DistributedDataParallel sends gradients in groups of about so many MB; its own default."""


class Replica(DistributedDataParallel):
    """This rank's copy of the model, as trained by all ranks together.

    ``wire`` is the type that gradients have on the network, ``control`` a group for small messages.
    ``sent_bytes`` counts those of all gradients so far, as each rank has them before the exchange;
    ``last_sent`` is when (``time.perf_counter``) the backward pass had its last gradients ready.

    The word vectors are averaged by :meth:`average_words`, to be called after ``backward``; the
    rest by DistributedDataParallel, whose own hook for bf16 is refused on gloo by its name.
    """

    def __init__(self, model: nn.Module, wire: torch.dtype, control: Any = None) -> None:
        words = word_vectors(model)
        ignored = [name for name, each in model.named_parameters() if each is words]
        # Its own documented way to leave a parameter to others, underscore or not.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            model, ignored
        )
        super().__init__(model, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB)
        if words is not None:
            # As DistributedDataParallel does with all others.
            dist.broadcast(words.data, 0, group=control)
        # Not as an attribute of the module: it would be listed twice among its parameters.
        self._words = (words,)
        self.wire, self.control = wire, control
        self.last_sent, self.sent_bytes = 0.0, 0
        # It refuses a function whose annotations are not its own types: a lambda has none.
        self.register_comm_hook(None, lambda _, bucket: self._send(bucket))

    def _send(self, bucket: Any) -> Future[Tensor]:
        """DistributedDataParallel's way to have a group of gradients averaged."""
        gradients = bucket.buffer()
        self.last_sent = time.perf_counter()
        sent = (gradients / dist.get_world_size()).to(self.wire)
        self.sent_bytes += sent.nbytes
        future: Future[Any] = dist.all_reduce(sent, async_op=True).get_future()

        def receive(done: Future[Any]) -> Tensor:
            averaged: Tensor = gradients.copy_(done.value()[0])
            return averaged

        return future.then(receive)

    def announce(self, ids: Tensor) -> Announced | None:
        """Begin to learn which words all ranks have in this step; None without word vectors."""
        (words,) = self._words
        if words is None:
            return None
        seen = torch.zeros(len(words), dtype=torch.uint8)
        seen[ids.flatten()] = 1
        work = dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.control, async_op=True)
        return Announced(seen, work)

    def average_words(self, announced: Announced) -> None:
        """Average the word vectors' gradients over all ranks: of the rows that any has seen."""
        (words,) = self._words
        assert words is not None
        gradient = words.grad
        assert gradient is not None, "the table of word vectors took part in the backward pass"
        announced.work.wait()
        rows = announced.seen.nonzero().squeeze(1)
        sent = (gradient[rows] / dist.get_world_size()).to(self.wire)
        self.sent_bytes += sent.nbytes
        dist.all_reduce(sent)
        gradient[rows] = sent.to(gradient.dtype)


class Announced:
    """The words of all ranks, once ``work`` is done: ``seen`` has a 1 for each of them."""

    def __init__(self, seen: Tensor, work: Any) -> None:
        self.seen, self.work = seen, work


def word_vectors(model: nn.Module) -> Tensor | None:
    """The model's table of word vectors; None where something else may change its gradients."""
    table = model.get_input_embeddings()  # type: ignore[operator]
    if not isinstance(table, nn.Embedding) or not table.weight.requires_grad:
        return None
    # Shared with another layer, as by language models, it gets gradients in every row.
    owners = [
        name
        for name, each in model.named_parameters(remove_duplicate=False)
        if each is table.weight
    ]
    return table.weight if len(owners) == 1 else None
