"""The ranks of a run: how they join, and how they communicate.

The data goes through the chosen backend. Small control messages (host names, a tokenizer, predictions)
always go through gloo, which has every collective that they need.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import WorkerError, first_line
from .pinning import beside_computing
from .process import LocalPlace, RankIdentity, read_identity, read_local_place

CCL_MODULE = "oneccl_bindings_for_pytorch"
ASKED = "chosen by --backend or by the stack"
TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others: longer than the slowest download of a model.
:mod:`.heartbeat` detects a lost rank earlier; this is for one that hangs. oneCCL ignores it."""


class Backend(NamedTuple):
    """A backend's name in torch.distributed, and why it was chosen."""

    name: str
    reason: str


def choose_backend(asked: str) -> Backend:
    """Return the backend to start. ``auto`` may fall back to gloo; any other choice never does."""
    if asked == "gloo":
        return Backend("gloo", ASKED)
    try:
        importlib.import_module(CCL_MODULE)  # registers itself with torch.distributed
    except ImportError as error:
        if asked == "ccl":
            raise WorkerError(
                f"--backend ccl needs {CCL_MODULE}: {first_line(error)}",
                hint="use a stack that has it, or --backend gloo",
            ) from error
        return Backend("gloo", f"ccl is not available: {first_line(error)}")
    return Backend("ccl", f"{CCL_MODULE} is installed" if asked == "auto" else ASKED)


@dataclass(frozen=True)
class Ranks:
    """One rank's view of all ranks; by default, a process alone. All ranks must call every method (except the
    properties) in the same order."""

    identity: RankIdentity = field(default_factory=RankIdentity)
    backend: str = "none"
    backend_reason: str = "one process"
    control: Any = None
    """A gloo group of all ranks, for messages other than gradients."""
    local: LocalPlace = field(default_factory=LocalPlace)

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def size(self) -> int:
        return self.identity.size

    @property
    def planned(self) -> int:
        """The planned number of ranks, which determines the batches and so the result."""
        return self.identity.planned or self.size

    @property
    def first(self) -> bool:
        """Whether this rank prints the events and writes the results."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank."""
        values = [value] * self.size
        if self.size == 1:
            return values
        dist.all_gather_object(values, value, group=self.control)
        return values

    def share(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def gather_later(self, numbers: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Start to gather every rank's numbers; return a function that waits for them, in rank order."""
        own = torch.tensor(numbers, dtype=torch.float64)
        every, work = send_to_all(own, self.control) if self.size > 1 else (own[None], None)

        def receive() -> list[list[float]]:
            if work is not None:
                work.wait()
            rows: list[list[float]] = every.tolist()
            return rows

        return receive


def send_to_all(own: Tensor, group: Any) -> tuple[Tensor, dist.Work]:
    """Start to gather every rank's vector; return it, shape (ranks, numbers), and what to wait for.

    The vectors go straight from rank to rank. In a ring (``all_gather``), network delays would grow with the
    ranks, and gloo's thread would start a team for its copies.
    """
    every = own.new_empty(dist.get_world_size(group), len(own))
    sent = own.repeat(len(every))
    return every, dist.all_to_all_single(every.view(-1), sent, group=group, async_op=True)


@contextmanager
def join(asked_backend: str, environ: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """Connect the ranks inside a ``with`` block. Raises :class:`WorkerError`.

    The group is left only after success: after a failure, leaving could wait for ranks that are gone or
    stuck. The process then exits and ends them through :func:`.process.abort_all`.
    """
    identity = read_identity(environ)
    backend = choose_backend(asked_backend)
    with beside_computing() if backend.name == "gloo" else nullcontext():
        _connect(identity, backend.name, environ)
    control = new_group()
    # Ask torch which backend runs: results must not merely repeat the request.
    name, local = str(dist.get_backend()), read_local_place(environ)
    yield Ranks(identity, name, backend.reason, control, local)
    dist.barrier(group=control)
    # Leaving oneCCL's group may hang [tried: 2021.14, `bench`]; the process ends soon anyway.
    if name != "ccl":
        dist.destroy_process_group()


def new_group(ranks: Sequence[int] | None = None) -> Any:
    """Create a gloo group of some ranks, or of all; all ranks must call this."""
    with beside_computing():
        return dist.new_group(ranks, backend="gloo", timeout=TIMEOUT)


def _connect(identity: RankIdentity, backend: str, environ: Mapping[str, str]) -> None:
    size, rank = identity.size, identity.rank
    # A single process needs no address; several meet at MASTER_ADDR:MASTER_PORT.
    # (HashStore is documented, but torch's typing does not list it as exported.)
    store = dist.HashStore() if size == 1 else None  # type: ignore[attr-defined]
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        address = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT', 29500)}"
        raise WorkerError(
            f"rank {rank} of {size} can't join the others over {backend}: {first_line(error)}",
            hint=f"every node must reach {address}, and GLOO_SOCKET_IFNAME must name the interface",
        ) from error


def lost_peer(error: BaseException) -> bool:
    """Return whether an error only means that another rank is gone or silent."""
    # Gloo's own failures are plain RuntimeErrors that name one of its source files.
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/" in str(error)
    )
