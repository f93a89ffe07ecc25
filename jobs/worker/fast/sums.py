"""Sums over all ranks. The backend's ring sums over the ranks of one node, or of up to three nodes with one
rank each. Otherwise, ranks exchange parts of the numbers: see :class:`SumOfParts`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.futures import Future
from torch.nn.functional import pad

from ..runtime.pinning import leave_computing_cpus
from ..runtime.ranks import Ranks, new_group, send_to_all

Array = NDArray[Any]
FEW = 4
"""From so many members of a group on, its members exchange parts directly. A ring's network delays grow with
them, but it takes less CPU time: with two ranks on each of two nodes, a quarter."""


class SumOverRanks(Protocol):
    """Starts to sum a vector over all ranks, and returns the sum to come. It may change the vector."""

    def __call__(self, values: Tensor) -> Future[Tensor]: ...


def choose_all_reduce(ranks: Ranks) -> SumOverRanks:
    """Choose the algorithm by where the ranks run; all ranks must call this."""
    places = ranks.gather(ranks.local)
    local = places[0].size
    regular = all(place == (rank % local, local) for rank, place in enumerate(places))
    alone = local == 1 and ranks.size < FEW
    if ranks.backend != "gloo" or alone or ranks.size == local or not regular:
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
    each of four nodes, 14 % less crosses the network than in a ring. From :data:`FEW` nodes on, parts go
    straight from rank to rank: a sum takes as many network delays on sixteen nodes as on four.

    Stages work on different vectors at the same time. Each has its own thread and group, because all ranks
    must use a group in the same order. They add in fp32, also what is sent in bf16.
    """

    def __init__(self, rank: int, size: int, local: int) -> None:
        nodes, rails = _levels(size, local)
        stages: list[tuple[Any, list[range]]] = [(_sum_part, rails), (_join, rails)]
        if len(rails[0]) < FEW:
            stages = [(_sum_in_ring, rails)]
        if local > 1:
            stages = [(_sum_part, nodes), *stages, (_join, nodes)]
        self._size = size
        self._stages = [(work, _own_group(rank, lists), _own_thread()) for work, lists in stages]
        self.rows = SumOfRows(rank, size, local)

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
                future.set_exception(error)  # type: ignore[arg-type]

        thread.submit(run)


def _sum_part(values: Tensor, group: Any) -> Tensor:
    """Return this rank's part of ``values``, summed over the ranks of its group."""
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values, group=group)
    first, *others = received.chunk(dist.get_world_size(group))
    # The sum of two numbers is rounded once in any type.
    total = first.float() if len(others) > 1 else first
    for other in others:
        total += other
    return total.to(values.dtype)


def _sum_in_ring(part: Tensor, group: Any) -> Tensor:
    dist.all_reduce(part, group=group)
    return part


def _join(part: Tensor, group: Any) -> Tensor:
    """Return the parts of all ranks of the group, one behind the other."""
    parts, work = send_to_all(part, group)
    work.wait()
    return parts.view(-1)


class SumOfRows:
    """Sums rows of a table over all ranks, each of which has only some; ``local`` as in :class:`SumOfParts`.

    Each rank sums its share of the rows: first over its node, then over the nodes. A rank sends the rows that
    it has, not all that some rank has, so about half as much crosses the network. It has its own thread and
    groups, so that it runs beside the other gradients' sums.
    """

    def __init__(self, rank: int, size: int, local: int) -> None:
        self._rank, self._size, self._local = rank, size, local
        self._node, self._rail = (_own_group(rank, lists) for lists in _levels(size, local))
        self._thread = _own_thread()

    def start(
        self, table: Tensor, prepare: Callable[[Tensor], Tensor], bits: Array, work: dist.Work
    ) -> futures.Future[tuple[Tensor, Tensor]]:
        """Start to sum what ``prepare`` returns for this rank's rows.

        Rank n has the rows of ``bits[n]`` after ``work``. The result has all ranks' rows, and their sums.
        """
        return self._thread.submit(self._sum, table, prepare, bits, work)

    def _sum(
        self, table: Tensor, prepare: Callable[[Tensor], Tensor], bits: Array, work: dist.Work
    ) -> tuple[Tensor, Tensor]:
        work.wait()
        has = np.unpackbits(bits, axis=1, count=len(table)).view(bool)
        union = np.flatnonzero(has.any(0))
        (node, rank), has = divmod(self._rank, self._local), has[:, union]
        # Which rank of a node sums a row, and on which node.
        turn = np.arange(len(union))
        ranks, nodes = turn % self._local, turn // self._local % (self._size // self._local)
        of_nodes = has.reshape(self._size // self._local, self._local, len(union))
        mine = prepare(table[torch.from_numpy(union[has[self._rank]])])
        mine = _sum_rows(mine, of_nodes[node], ranks, rank, self._node)
        mine = _sum_rows(mine, of_nodes.any(1) & (ranks == rank), nodes, node, self._rail)
        counts = np.bincount(nodes[ranks == rank], minlength=len(of_nodes))
        mine = _join_rows(mine, counts, self._rail)
        mine = _join_rows(mine, np.bincount(ranks, minlength=self._local), self._node)
        return torch.from_numpy(union[np.lexsort((nodes, ranks))]), mine


def _sum_rows(values: Tensor, has: Array, place: Array, own: int, group: Any) -> Tensor:
    """Return the sums of the rows whose ``place`` in the group is ``own``.

    ``has`` says which rows each member has, shape (members, rows); ``values`` are this one's.
    """
    to = place[has[own]]
    order = torch.from_numpy(np.argsort(to, kind="stable"))
    wanted = has & (place == own)
    received = values.new_empty(int(wanted.sum()), values.shape[1])
    splits = wanted.sum(1).tolist(), np.bincount(to, minlength=len(has)).tolist()
    dist.all_to_all_single(received, values[order], *splits, group=group)
    kept = wanted.any(0)
    number = torch.from_numpy((np.cumsum(kept) - 1)[np.nonzero(wanted)[1]])
    total = torch.zeros(int(kept.sum()), values.shape[1])
    return total.index_add_(0, number, received.float()).to(values.dtype)


def _join_rows(part: Tensor, counts: Array, group: Any) -> Tensor:
    """Return the rows of all members of the group, one behind the other; they have ``counts``."""
    received = part.new_empty(int(counts.sum()), part.shape[1])
    splits = counts.tolist(), [len(part)] * len(counts)
    dist.all_to_all_single(received, part.repeat(len(counts), 1), *splits, group=group)
    return received


def _levels(size: int, local: int) -> tuple[list[range], list[range]]:
    """Return the ranks of each node, and those that have the same place on each node."""
    nodes = [range(first, first + local) for first in range(0, size, local)]
    return nodes, [range(first, size, local) for first in range(local)]


def _own_thread() -> ThreadPoolExecutor:
    def start() -> None:
        compute_alone()
        leave_computing_cpus()

    return ThreadPoolExecutor(1, initializer=start)


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
    groups = [new_group(list(ranks)) for ranks in lists]
    return next(group for group, ranks in zip(groups, lists) if rank in ranks)  # noqa: B905 - 3.8
