"""Sums of gradients: in bf16, half the bytes of fp32, while the backward pass still runs.

The word embeddings are a third of DistilBERT, and their gradients come last. Only the rows that some rank
has gradients for are sent.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..runtime.ranks import Ranks, send_to_all
from .compilation import FAST
from .embedding import UsedEmbedding, word_table
from .sums import SumOfParts, choose_all_reduce, compute_alone

BUCKET_MB = 5
"""Size in fp32 of the groups in which DistributedDataParallel sends gradients, and in bf16 half of it. The
default of 25 holds back most of the first layer's, whose transfer nothing hides, until the last is known."""


class Replica(DistributedDataParallel):
    """This rank's replica of the model, which all ranks train together.

    With ``bf16``, gradients are sent in it; ``options`` are DistributedDataParallel's. ``last_sent`` is the
    time (``time.perf_counter``) at which the backward pass had its last gradients ready.

    Gradients are summed, or averaged if ``share`` is 1 / ranks: scaling the loss is free, scaling gradients
    takes a pass over them. DistributedDataParallel sums all but those of the word embeddings; its own bf16
    hook refuses gloo. Raises ``ValueError`` for a group of some ranks.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks, bf16: bool, share: float = 1.0, **options: Any
    ) -> None:
        for name in ("process_group", "device_mesh"):
            if options.get(name) is not None:
                raise ValueError(f"{name} is not supported: all ranks train the model together")
        table = word_table(model)
        words = None if table is None else table.weight
        ignored = [name for name, each in model.named_parameters() if each is words]
        # The documented way to exclude a parameter, despite the underscore.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            model, ignored
        )
        size = min(each.element_size() for each in model.parameters() if each.requires_grad)
        own: dict[str, Any] = {
            "gradient_as_bucket_view": True,
            "bucket_cap_mb": BUCKET_MB * size / 4,
        }
        super().__init__(model, **{**own, **options})
        if not options.keys() & {"broadcast_buffers", "forward_sync_buffers"}:
            # Before each forward pass, all ranks would wait for rank 0's buffers. Those that training
            # changes, such as batch normalization's averages, are part of the state.
            kept = model.state_dict().keys()
            changing = (b.is_floating_point() and n in kept for n, b in model.named_buffers())
            self.broadcast_buffers = any(changing)
        if words is not None:
            # As DistributedDataParallel does with the other parameters.
            dist.broadcast(words.data, 0, group=ranks.control)
            if isinstance(table, UsedEmbedding):
                dist.broadcast(table.restored().weight.data, 0, group=ranks.control)
            words.register_post_accumulate_grad_hook(self._find_rows)  # type: ignore[no-untyped-call]
        self.control, self.all_reduce = ranks.control, choose_all_reduce(ranks)
        self._wire, self._share = torch.bfloat16 if bf16 else torch.float32, share
        self._sends, self.last_sent = True, 0.0
        self._computing: set[int] = set()
        self._troubled: Any = None
        self._agreed = False
        # It rejects functions with annotations of other types; a lambda has none.
        self.register_comm_hook(None, lambda _, bucket: self._send(bucket))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            self._sends = self.require_backward_grad_sync
            if self.training and self._sends:
                self._agree_on_layers()
        return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]

    def _agree_on_layers(self) -> None:
        """End compilation on all ranks before the same step if one rank could not use it.

        The message goes out a step ahead, so no rank waits for it.
        """
        fast = vars(self.module).get(FAST)
        if fast is None or self._agreed:
            return
        if self._troubled:
            troubled, work = self._troubled
            work.wait()
            if troubled:
                self._agreed, texts = True, [""] * dist.get_world_size()
                dist.all_gather_object(texts, fast.trouble, group=self.control)
                fast.end(texts)
                return
        troubled = torch.tensor([bool(fast.trouble)], dtype=torch.uint8)
        work = dist.all_reduce(troubled, dist.ReduceOp.MAX, group=self.control, async_op=True)
        self._troubled = troubled, work

    def _send(self, bucket: Any) -> Future[Tensor]:
        """Start to sum a group of gradients, for DistributedDataParallel."""
        gradients = bucket.buffer()
        self.last_sent = time.perf_counter()
        self._computing.add(threading.get_ident())

        def receive(done: Future[Tensor]) -> Tensor:
            if threading.get_ident() not in self._computing:
                compute_alone()  # the backend's thread
            total: Tensor = gradients.copy_(done.value())
            return total

        return self._sum(gradients).then(receive)

    def _sum(self, gradients: Tensor) -> Future[Tensor]:
        """Start to sum a vector over all ranks. It may change the vector."""
        return self.all_reduce(self._prepare(gradients))

    def _prepare(self, gradients: Tensor) -> Tensor:
        """Return gradients as they are sent. It may change them."""
        if self._share != 1:
            gradients.mul_(self._share)
        return gradients.to(self._wire)

    def _find_rows(self, words: Tensor) -> None:
        """Start to learn for which embeddings any rank has gradients, as soon as this rank has its own."""
        gradient = words.grad
        if not self._sends or gradient is None:
            return
        # Not from the IDs: a model may use the table in other ways, and a batch may name its IDs otherwise.
        # (This takes half the time of `any`, and the sum of squares could underflow.)
        seen = np.packbits(torch.linalg.vector_norm(gradient, ord=1, dim=1).ne(0).numpy())
        all_seen, work = send_to_all(torch.from_numpy(seen), self.control)
        engine = torch.autograd.Variable._execution_engine
        if isinstance(self.all_reduce, SumOfParts):
            rows = self.all_reduce.rows.start(gradient, self._prepare, all_seen.numpy(), work)
            engine.queue_callback(lambda: _set_rows(gradient, *rows.result()))
        else:
            # At the end of the backward pass, after DistributedDataParallel's own sums: all ranks must send
            # in the same order.
            engine.queue_callback(lambda: self._sum_rows(gradient, all_seen, work))

    def _sum_rows(self, gradient: Tensor, seen: Tensor, work: Any) -> None:
        """Sum the gradients of the embeddings that ``seen`` has a bit for, shape (ranks, rows / 8)."""
        work.wait()
        bits = np.unpackbits(np.bitwise_or.reduce(seen.numpy()), count=len(gradient))
        rows = torch.from_numpy(bits).nonzero().squeeze(1)
        if len(rows):  # the whole loss may have no gradient, such as a margin's
            _set_rows(
                gradient, rows, self._sum(gradient[rows].flatten()).wait().view(len(rows), -1)
            )


def _set_rows(gradient: Tensor, rows: Tensor, values: Tensor) -> None:
    gradient[rows] = values.to(gradient.dtype)
