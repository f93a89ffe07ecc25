"""How a job starts: the content of its batch script, and mpirun on the nodes that it got. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..runtime import output
from ..runtime.cores import CoreShare
from ..runtime.process import PLANNED
from .pinning import render_pinning

CHECKPOINTS = f"output/{output.CHECKPOINTS}"
BEGIN, END, CANCELLED = "begin.json", "end.json", "cancelled"
"""Files in a job's folder on the head: JSON about its last attempt, and a mark that a user ended it."""
SECRETS = "environment.json"
"""The user's variables for the program, on every node until the job has ended."""
FOLDER = "SPR_JOB_FOLDER"
"""The environment variable of all processes of a job on its first node."""
MASTER_PORT = "29500"


@dataclass(frozen=True)
class Launch:
    """A job before it has nodes. ``env`` are the variables of all ranks, ``exports`` those of mpirun.

    ``pinning`` are the ranks' cores on each node that the job may use. ``setup`` are shell lines to run
    before mpirun. ``head`` is the name of the node that keeps the job's log and results.
    """

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
    again: tuple[str, ...] = ()
    """The program of later attempts, if it differs: it resumes instead of starting over."""
    retries: int = 0
    """How often the job may run again after it has lost a rank or a node."""
    planned_nodes: int = 0
    """With how many nodes the job begins."""
    least_nodes: int = 0
    """With how many it goes on after a loss; 0 for all."""

    def prepared(self, *, again: bool, pinning: Mapping[str, Sequence[CoreShare]]) -> Launch:
        """Return the launch of an attempt. With ``again``, it resumes what an earlier one has left."""
        program = self.again if again and self.again else self.program
        return replace(self, program=program, pinning={**self.pinning, **pinning})

    def render(self) -> bytes:
        """Return the launch as JSON."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()


def parse_launch(text: str) -> Launch:
    """Return what :meth:`Launch.render` wrote."""
    content: dict[str, Any] = json.loads(text)
    words = {name: tuple(content[name]) for name in ("program", "setup", "again")}
    pinning = {
        name: tuple(CoreShare(tuple(s["cpus"]), tuple(s["workers"]), s["numa"]) for s in shares)
        for name, shares in content["pinning"].items()
    }
    return Launch(**{**content, **words, "pinning": pinning})


def build_argv(launch: Launch, nodes: Sequence[str], address: str) -> list[str]:
    """Return the mpirun command of a job on these nodes, in the order of their ranks.

    ``address`` is that of the first one, where the ranks meet. Raises :class:`KeyError` for a node that
    the job was not prepared for.
    """
    ranks, threads = launch.nproc_per_node, launch.omp_threads
    each = [render_pinning(launch.pinning[n], ranks, threads, ccl=launch.ccl) for n in nodes]
    per_node, count = str(ranks), str(ranks * len(nodes))
    shared = {"MASTER_ADDR": address, "MASTER_PORT": MASTER_PORT, **launch.env}
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
