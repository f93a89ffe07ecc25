"""Sums of gradients: in bf16, half the bytes of fp32, while the backward pass still runs.

The word embeddings are a third of DistilBERT, and their gradients come last. Only the rows that some rank
has gradients for are sent.

Sums are computed in one ring or by node. In one ring, the ranks of a node pass everything on to each other,
and one flow leaves each node. By node, each rank first sums its part of the numbers over the ranks of its
node, then this part over the nodes. So each rank has a flow, and with two ranks on each of four nodes, 14 %
less crosses the network.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel

from ..runtime.ranks import TIMEOUT, Ranks
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
    if ranks.backend != "gloo" or local == 1 or ranks.size == local or not regular:
        return sum_in_ring
    return SumByNode(ranks.rank, ranks.size, local)


def sum_in_ring(values: Tensor) -> Future[Tensor]:
    """Sum over all ranks with the backend's own algorithm."""
    future: Future[Any] = dist.all_reduce(values, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


class SumByNode:
    """Sums over all ranks, ``local`` consecutive ones of which run on each node.

    Three stages work on different vectors at the same time. Each has its own thread and group,
    because all ranks must use a group in the same order.
    """

    def __init__(self, rank: int, size: int, local: int) -> None:
        nodes = [range(first, first + local) for first in range(0, size, local)]
        rails = [range(first, size, local) for first in range(local)]
        self._scatter, self._gather, self._across = (
            _own_group(rank, lists) for lists in (nodes, nodes, rails)
        )
        self._local = local
        self._threads = [ThreadPoolExecutor(1, initializer=compute_alone) for _ in range(3)]

    def __call__(self, values: Tensor) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        self._start(0, self._sum_part, values, future)
        return future

    def _start(self, stage: int, work: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except Exception as error:
                arguments[-1].set_exception(error)

        self._threads[stage].submit(run)

    def _sum_part(self, values: Tensor, future: Future[Tensor]) -> None:
        """Sum one part over the ranks of this node."""
        missing = -len(values) % self._local
        sent = pad(values, (0, missing)) if missing else values  # pad always copies
        parts = torch.empty_like(sent)
        dist.all_to_all_single(parts, sent, group=self._scatter)
        part, *others = parts.chunk(self._local)
        for other in others:  # torch.sum takes eight times as long in bf16
            part += other
        self._start(1, self._sum_across, part, values, future)

    def _sum_across(self, part: Tensor, values: Tensor, future: Future[Tensor]) -> None:
        """Sum this part over the nodes."""
        dist.all_reduce(part, group=self._across)
        self._start(2, self._join, part, values, future)

    def _join(self, part: Tensor, values: Tensor, future: Future[Tensor]) -> None:
        """Gather the parts of this node's ranks."""
        parts = [torch.empty_like(part) for _ in range(self._local)]
        dist.all_gather(parts, part, group=self._gather)
        future.set_result(torch.cat(parts)[: len(values)])


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
        seen = torch.linalg.vector_norm(gradient, ord=1, dim=1).ne(0).to(torch.uint8)
        work = dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.control, async_op=True)
        # At the end of the backward pass, after DistributedDataParallel's own sums: all ranks must send
        # in the same order.
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._sum_rows(gradient, seen, work))

    def _sum_rows(self, gradient: Tensor, seen: Tensor, work: Any) -> None:
        """Sum the gradients of these embeddings."""
        work.wait()
        rows = seen.nonzero().squeeze(1)
        if not len(rows):  # the whole loss may have no gradient, such as a margin's
            return
        # In groups of the usual size, so that the stages of a sum overlap.
        size = BUCKET_MB * 2**20 // gradient.element_size()
        groups = torch.split(gradient[rows].flatten(), size)
        total = torch.cat([each.wait() for each in [self._sum(group) for group in groups]])
        gradient[rows] = total.view(len(rows), -1).to(gradient.dtype)
