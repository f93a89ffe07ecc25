"""A job's start: its launch description, and mpirun on the assigned nodes with the cores of each node's
ranks. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..runtime.checkpoint_names import CHECKPOINTS as _CHECKPOINTS
from ..runtime.cores import CoreShare, cpu_mask
from ..runtime.pinning import VARIABLE, RankPlacement, format_cpus, render_plan
from ..runtime.process import NODES, PLANNED, VARIABLES
from ..spec import JobSpec, parse_spec
from ..storage.ownership import STATE

CHECKPOINTS = f"{STATE}/{_CHECKPOINTS}"
BEGIN, END, CANCELLED = "begin.json", "end.json", "cancelled"
"""Files in a job's folder on the head: JSON about its last attempt, and a marker for a user's cancel."""
FIRST = "first.json"
"""In a job's folder on all nodes: when it first started, which its limits count from if the head is lost."""
LAUNCH = "launch.json"
"""In a job's folder on every node: its launch, as last submitted."""
SECRETS = VARIABLES
MASTER_PORT = 29500
PORTS = 4
"""A job's ports on its first node: one more than those that its ranks and a user's program may take."""


@dataclass(frozen=True)
class Launch:
    """A job before it has nodes. ``env`` are the variables of all ranks, ``exports`` those of mpirun.

    ``pinning`` are the ranks' cores on each node that the job may use. ``setup`` are shell lines to run
    before mpirun. ``head`` is the name of the node that keeps the job's log and results.
    """

    spec: JobSpec
    folder: str
    head: str
    mpirun: str
    program: tuple[str, ...]
    nproc_per_node: int
    env: Mapping[str, str]
    pinning: Mapping[str, Sequence[CoreShare]]
    omp_threads: int
    ccl: bool
    """Whether the ranks communicate with oneCCL."""
    exports: Mapping[str, str]
    setup: tuple[str, ...] = ()
    resumes: bool = False
    """Whether later attempts get the argument ``--resume`` and resume instead of starting over."""
    planned_nodes: int = 0
    """Number of nodes to start with."""
    port: int = MASTER_PORT
    """Where the ranks meet on the first node."""

    @property
    def bucket(self) -> str:
        """The S3 URL of the job's folder; "" for none."""
        below = self.spec.storage.bucket
        return f"{below}/{Path(self.folder).name}" if below else ""

    def prepared(
        self, *, again: bool, pinning: Mapping[str, Sequence[CoreShare]], port: int
    ) -> Launch:
        """Return the launch of an attempt; with ``again``, it resumes the earlier one."""
        more = ("--resume",) if again and self.resumes else ()
        program, pinned = (*self.program, *more), {**self.pinning, **pinning}
        return replace(self, program=program, pinning=pinned, port=port)

    def render(self) -> bytes:
        """Return the launch as JSON."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def parse_launch(text: str) -> Launch:
    """Parse the result of :meth:`Launch.render`."""
    content: dict[str, Any] = json.loads(text)
    words = {name: tuple(content[name]) for name in ("program", "setup")}
    pinning = {
        name: tuple(CoreShare(tuple(s["cpus"]), tuple(s["workers"]), s["numa"]) for s in shares)
        for name, shares in content["pinning"].items()
    }
    spec = parse_spec(content["spec"])
    return Launch(**{**content, **words, "pinning": pinning, "spec": spec})


def build_argv(launch: Launch, nodes: Sequence[str], address: str) -> list[str]:
    """Return the mpirun command of a job on these nodes, in rank order.

    ``address`` is the first node's, where the ranks meet. Raises :class:`KeyError` for a node without a
    pinning plan.
    """
    ranks, threads = launch.nproc_per_node, launch.omp_threads
    each = [render_pinning(launch.pinning[n], ranks, threads, ccl=launch.ccl) for n in nodes]
    per_node, count = str(ranks), str(ranks * len(nodes))
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(launch.port)}
    shared = {**meeting, NODES: ",".join(nodes), **launch.env}
    if len(nodes) < launch.planned_nodes:
        shared[PLANNED] = str(launch.nproc_per_node * launch.planned_nodes)
    argv = [launch.mpirun, "-bootstrap", "slurm", "-ppn", per_node, "-wdir", launch.folder]
    if all(env == each[0] for env in each):
        options = _options("-genv", {**shared, **each[0]})
        return [*argv, "-n", count, *options, *launch.program]
    # Hydra's proxy reads a node's pinning from the first argument set of that node [tried: 2021.18],
    # and -ppn fills the nodes in their order, so there is one set for each of them.
    argv += _options("-genv", shared)
    for number, env in enumerate(each):
        separator = [":"] if number else []
        argv += [*separator, "-n", per_node, *_options("-env", env), *launch.program]
    return argv


def _options(flag: str, env: Mapping[str, str]) -> Iterable[str]:
    return [word for name, value in env.items() for word in (flag, name, value)]


def fit_pinning(shares: Sequence[CoreShare], cpus: Sequence[int]) -> tuple[CoreShare, ...]:
    """Return the ranks' cores on a node whose processes may use ``cpus``: the planned ones, if they fit.

    Otherwise, as after `repair`, each planned CPU maps to one of the node's, in order. With too few CPUs,
    the plan is kept, and a rank reports the difference.
    """
    planned = sorted({cpu for share in shares for cpu in (*share.cpus, *share.workers)})
    if set(planned) <= set(cpus) or len(planned) > len(cpus):
        return tuple(shares)
    to = dict(zip(planned, sorted(cpus)))  # noqa: B905 - Python 3.8; the lengths may differ
    # The NUMA node may also differ.
    return tuple(
        CoreShare(tuple(to[cpu] for cpu in each.cpus), tuple(to[cpu] for cpu in each.workers), None)
        for each in shares
    )


def take_cores(
    shares: Sequence[CoreShare], cores: Sequence[Sequence[int]]
) -> tuple[CoreShare, ...]:
    """Return the ranks' cores, planned by number, as those that the queue chose.

    ``cores`` are the NUMA node and the CPUs of each core.
    """

    def take(share: CoreShare) -> CoreShare:
        cpus, workers = (
            tuple(cores[number][1] for number in n) for n in (share.cpus, share.workers)
        )
        nodes = {cores[number][0] for number in (*share.cpus, *share.workers)}
        return CoreShare(cpus, workers, nodes.pop() if len(nodes) == 1 else None)

    return tuple(sorted(map(take, shares), key=lambda share: cpu_mask(share.cpus)))


def render_pinning(
    shares: Sequence[CoreShare], ranks: int, threads: int, *, ccl: bool
) -> dict[str, str]:
    """Return the environment of one node's ranks: their CPUs and the plan that each rank verifies.

    Without shares, nothing is pinned.
    """
    env = {}
    if shares:
        # Without 0x, Intel MPI prints an IPL2 error and chooses the pinning itself [tried].
        env["I_MPI_PIN_DOMAIN"] = f"[{','.join(hex(cpu_mask(share.cpus)) for share in shares)}]"
    unpinned = RankPlacement(cpus=None, threads=threads, memory=None)
    env[VARIABLE] = render_plan([_place(each, threads) for each in shares] or [unpinned] * ranks)
    if ccl:
        # One entry per worker of the node. "auto" would take the last CPUs of each domain:
        # https://oneapi-src.github.io/oneCCL/general-configuration/operation-execution.html
        workers = ",".join(str(cpu) for share in shares for cpu in share.workers)
        env["CCL_WORKER_AFFINITY"] = workers or "auto"
    return env


def _place(share: CoreShare, threads: int) -> RankPlacement:
    memory = None if share.numa is None else f"prefer:{share.numa}"
    return RankPlacement(format_cpus(share.cpus), threads, memory, format_cpus(share.workers))
