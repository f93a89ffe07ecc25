"""The ranks: who this process is, how it finds the others, and the few ways they talk.

The data goes through the backend that was chosen; the small control messages (who is where, a
tokenizer, predictions) always through gloo, which has every collective that they need.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from .errors import BackendError, first_line

CCL_MODULE = "oneccl_bindings_for_pytorch"
ASKED = "asked for by --backend, or by the stack"
TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others before it gives up: more than the slowest of them may need
to fetch a model, and short enough that a machine that died without a word does not cost hours."""

ABORT_SECONDS = 0.5
"""Time for this rank's last words to travel through mpirun, before it is told to end."""


class Identity(NamedTuple):
    """This process among all: ``rank`` (from 0) of ``size``."""

    rank: int = 0
    size: int = 1


def read_identity(environ: Mapping[str, str]) -> Identity:
    """Who mpirun says this process is; alone where nothing started it. Raises BackendError.

    Hydra (Intel MPI, MPICH) sets both variables in every process, with or without MPI in it.
    """
    if "PMI_RANK" not in environ and "PMI_SIZE" not in environ:
        return Identity()
    try:
        identity = Identity(int(environ["PMI_RANK"]), int(environ["PMI_SIZE"]))
    except (KeyError, ValueError) as error:
        raise BackendError(f"PMI_RANK and PMI_SIZE are not both set to numbers: {error}") from error
    if not 0 <= identity.rank < identity.size:
        raise BackendError(f"PMI_RANK {identity.rank} does not fit PMI_SIZE {identity.size}")
    if identity.size > 1 and not environ.get("MASTER_ADDR"):
        raise BackendError("MASTER_ADDR is not set: the ranks can't find rank 0")
    return identity


class Backend(NamedTuple):
    """A name that torch.distributed knows, and why it was taken."""

    name: str
    reason: str


def choose_backend(asked: str) -> Backend:
    """The backend to start: what was asked for or an error, never something else in its place."""
    if asked == "gloo":
        return Backend("gloo", ASKED)
    try:
        importlib.import_module(CCL_MODULE)  # registers itself with torch.distributed
    except ImportError as error:
        if asked == "ccl":
            raise BackendError(
                f"--backend ccl needs {CCL_MODULE}: {first_line(error)}",
                hint="use a stack that has it, or --backend gloo",
            ) from error
        return Backend("gloo", f"ccl can't be used: {first_line(error)}")
    return Backend("ccl", f"{CCL_MODULE} is installed" if asked == "auto" else ASKED)


@dataclass(frozen=True)
class Ranks:
    """All ranks of the run, seen from one of them. Every method but the properties must be
    called by all ranks, in the same order."""

    identity: Identity
    backend: str
    backend_reason: str
    control: Any
    """A gloo group of all ranks, for messages other than gradients."""

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def size(self) -> int:
        return self.identity.size

    @property
    def first(self) -> bool:
        """This is the rank that speaks and writes."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        import torch.distributed as dist

        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def mean(self, value: Any) -> float:
        """The mean over all ranks of a tensor of one number."""
        import torch.distributed as dist

        total = value.detach().float().clone()
        dist.all_reduce(total)
        return float(total) / self.size


@contextmanager
def join(asked_backend: str, environ: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """The ranks, connected for the duration of a ``with`` block; raises :class:`BackendError`.

    Leaves the group only after success: after a failure the others may be gone or stuck, and
    leaving could wait for them. The process ends instead, and ends them by :func:`abort_all`.
    """
    import torch.distributed as dist

    identity = read_identity(environ)
    backend = choose_backend(asked_backend)
    _connect(identity, backend.name, environ)
    control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    # What really runs, asked of torch itself: the results must not repeat a mere wish.
    yield Ranks(identity, str(dist.get_backend()), backend.reason, control)
    dist.barrier(group=control)
    dist.destroy_process_group()


def _connect(identity: Identity, backend: str, environ: Mapping[str, str]) -> None:
    import torch.distributed as dist

    size, rank = identity.size, identity.rank
    # Alone, a process needs no address to meet itself; many meet at MASTER_ADDR:MASTER_PORT.
    # (HashStore is documented, but torch's typing does not list it as exported.)
    store = dist.HashStore() if size == 1 else None  # type: ignore[attr-defined]
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        address = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT', 29500)}"
        raise BackendError(
            f"rank {rank} of {size} can't join the others over {backend}: {first_line(error)}",
            hint=f"every node must reach {address}, and GLOO_SOCKET_IFNAME must name the interface",
        ) from error


def abort_all(environ: Mapping[str, str] = os.environ) -> None:
    """Ask mpirun to end every rank, with exit code 1; does nothing where mpirun is not there.

    Intel's Hydra (tried: 2021.18) ends the others by itself only for programs that have called
    MPI_Init. These processes have not: were one of them killed, it would wait for the rest. So we
    send what MPI_Abort would, a line of the PMI-1 protocol on the descriptor that Hydra opened.
    """
    if environ.get("PMI_FD", "").isdecimal():
        time.sleep(ABORT_SECONDS)
        with suppress(OSError):
            os.write(int(environ["PMI_FD"]), b"cmd=abort exitcode=1\n")


def lost_peer(error: BaseException) -> bool:
    """The error only says that another rank is gone or silent, so the cause lies there."""
    import torch.distributed as dist

    # Gloo's own failures are plain RuntimeErrors that name one of its source files.
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/" in str(error)
    )
