"""Sums of gradients: in bf16, half the bytes of fp32, while the backward pass still runs.

The word embeddings are a third of DistilBERT, and their gradients come last. Only the rows that some rank
has gradients for are sent.

The backend's ring sums over the ranks of one node, or of up to three nodes with one rank each. Otherwise,
ranks exchange parts of the numbers: see :class:`SumOfParts`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from ..runtime.ranks import TIMEOUT, Ranks, send_to_all
from .compilation import FAST
from .embedding import UsedEmbedding, word_table

BUCKET_MB = 5
"""Size in fp32 of the groups in which DistributedDataParallel sends gradients, and in bf16 half of it. The
default of 25 holds back most of the first layer's, whose transfer nothing hides, until the last is known."""


class SumOverRanks(Protocol):
    """Starts to sum a vector over all ranks, and returns the sum to come. It may change the vector."""

    def __call__(self, values: Tensor) -> Future[Tensor]: ...


def choose_all_reduce(ranks: Ranks) -> SumOverRanks:
    """Choose the algorithm by where the ranks run; all ranks must call this."""
    places = ranks.gather(ranks.local)
    local = places[0].size
    regular = all(place == (rank % local, local) for rank, place in enumerate(places))
    # A ring takes a third less CPU time, as long as it has few members.
    if ranks.backend != "gloo" or ranks.size < 4 or ranks.size == local or not regular:
        return sum_in_ring
    return SumOfParts(ranks.rank, ranks.size, local)


def sum_in_ring(values: Tensor) -> Future[Tensor]:
    """Sum over all ranks with the backend's own algorithm."""
    future: Future[Any] = dist.all_reduce(values, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


class SumOfParts:
    """Sums over all ranks, ``local`` consecutive ones of which run on each node.

    Each rank first sums its part of the numbers over the ranks of its node, then its part of this part over
    the nodes. The sums go back the same way. So each rank has a flow to other nodes, and with two ranks on
    each of four nodes, 14 % less crosses the network than in a ring. Parts go straight from rank to rank: a
    sum takes as many network delays on sixteen nodes as on two, where a ring's grow with the ranks.

    Stages work on different vectors at the same time. Each has its own thread and group, because all ranks
    must use a group in the same order. Sums are formed in fp32, whatever is sent.
    """

    def __init__(self, rank: int, size: int, local: int) -> None:
        nodes = [range(first, first + local) for first in range(0, size, local)]
        rails = [range(first, size, local) for first in range(local)]
        levels = [each for each in (nodes, rails) if len(each[0]) > 1]
        stages = [(_sum_part, each) for each in levels] + [(_join, each) for each in levels[::-1]]
        self._size = size
        self._stages = [
            (work, _own_group(rank, lists), ThreadPoolExecutor(1, initializer=compute_alone))
            for work, lists in stages
        ]

    def __call__(self, values: Tensor) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        missing = -len(values) % self._size
        self._start(0, pad(values, (0, missing)) if missing else values, len(values), future)
        return future

    def _start(self, stage: int, values: Tensor, length: int, future: Future[Tensor]) -> None:
        if stage == len(self._stages):
            future.set_result(values[:length])
            return
        work, group, thread = self._stages[stage]

        def run() -> None:
            try:
                self._start(stage + 1, work(values, group), length, future)
            except Exception as error:
                future.set_exception(error)

        thread.submit(run)


def _sum_part(values: Tensor, group: Any) -> Tensor:
    """Return this rank's part of ``values``, summed over the ranks of its group."""
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values, group=group)
    first, *others = received.chunk(dist.get_world_size(group))
    total = first.float()
    for other in others:
        total += other
    return total.to(values.dtype)


def _join(part: Tensor, group: Any) -> Tensor:
    """Return the parts of all ranks of the group, one behind the other."""
    parts, work = send_to_all(part, group)
    work.wait()
    return parts.view(-1)


def compute_alone() -> None:
    """Let torch's operations in this thread use no other threads.

    Otherwise each thread that runs large operations starts an OpenMP team, which competes with the computing
    threads.
    """
    torch.get_num_threads()  # the first operation would set it again
    # torch.set_num_threads would also hold for threads that start later.
    with suppress(AttributeError):  # in a torch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)


def _own_group(rank: int, lists: Sequence[range]) -> Any:
    """Create a group for each list of ranks, as all ranks must, and return this rank's group."""
    groups = [dist.new_group(list(ranks), backend="gloo", timeout=TIMEOUT) for ranks in lists]
    return next(group for group, ranks in zip(groups, lists) if rank in ranks)  # noqa: B905 - 3.8


class Replica(DistributedDataParallel):
    """This rank's replica of the model, which all ranks train together.

    With ``bf16``, gradients are sent in it; ``options`` are DistributedDataParallel's. ``last_sent`` is the
    time (``time.perf_counter``) at which the backward pass had its last gradients ready.

    Gradients are summed, or averaged if ``share`` is 1 / ranks: scaling the loss is free, scaling gradients
    takes a pass over them. DistributedDataParallel sums all but those of the word embeddings; its own bf16
    hook refuses gloo.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks, bf16: bool, share: float = 1.0, **options: Any
    ) -> None:
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
                fast.end(self.module, texts)
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
        if self._share != 1:
            gradients.mul_(self._share)
        return self.all_reduce(gradients.to(self._wire))

    def _find_rows(self, words: Tensor) -> None:
        """Start to learn for which embeddings any rank has gradients, as soon as this rank has its own."""
        gradient = words.grad
        if not self._sends or gradient is None:
            return
        # Not from the IDs: a model may use the table in other ways, and a batch may name its IDs otherwise.
        # (This takes half the time of `any`, and the sum of squares could underflow.)
        seen = np.packbits(torch.linalg.vector_norm(gradient, ord=1, dim=1).ne(0).numpy())
        all_seen, work = send_to_all(torch.from_numpy(seen), self.control)
        # At the end of the backward pass, after DistributedDataParallel's own sums: all ranks must send
        # in the same order.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._sum_rows(gradient, all_seen, work))

    def _sum_rows(self, gradient: Tensor, seen: Tensor, work: Any) -> None:
        """Sum the gradients of the embeddings that ``seen`` has a bit for, shape (ranks, rows / 8)."""
        work.wait()
        bits = np.unpackbits(np.bitwise_or.reduce(seen.numpy()), count=len(gradient))
        rows = torch.from_numpy(bits).nonzero().squeeze(1)
        if not len(rows):  # the whole loss may have no gradient, such as a margin's
            return
        # In groups of the usual size, so that the stages of a sum overlap.
        size = BUCKET_MB * 2**20 // gradient.element_size()
        groups = torch.split(gradient[rows].flatten(), size)
        total = torch.cat([each.wait() for each in [self._sum(group) for group in groups]])
        gradient[rows] = total.view(len(rows), -1).to(gradient.dtype)
