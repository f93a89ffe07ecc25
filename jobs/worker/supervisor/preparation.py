"""Before mpirun starts: every node gets what it lacks, such as one that `repair` has replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..runtime.cores import CoreShare
from .copies import order_nodes
from .launch import Launch
from .nodes import NodeState, ask_nodes, fetch_checkpoint, newest_copy, send_files
from .pinning import fit_pinning
from .slurm import SlurmJob
from .supervise import announce


@dataclass(frozen=True)
class Preparation:
    """The launch that fits the attempt's nodes, and the nodes that may have copies of its checkpoints.

    ``copied`` is the step of the newest copy on the first of them.
    """

    launch: Launch
    others: list[str]
    copied: int


def prepare(launch: Launch, job: SlurmJob) -> Preparation:
    """Send the job's files and the newest checkpoint to where they are missing."""
    here = job.nodes[0]
    known = launch.pinning if launch.again else ()
    states = ask_nodes(launch.folder, (*job.nodes, *known), here)
    lacking = [name for name, state in states.items() if not state.has_files]
    for name in send_files(launch.folder, lacking):
        announce(event="note", text=f"warning: {name} does not take the job's files")
    newest = max((state.newest for state in states.values()), default=-1)
    if launch.again and (source := newest_copy(states, here)):
        step = states[source].newest
        what = f"checkpoint step-{step:06d} from {source}"
        done = fetch_checkpoint(launch.folder, step, source)
        announce(event="note", text=what if done else f"warning: {what} can't be fetched")
    others = order_nodes(filter(states.__contains__, launch.pinning), here, launch.head)
    copied = states[others[0]].newest if others else -1
    has_state = job.attempt > 1 or newest >= 0
    ready = launch.prepared(again=has_state, pinning=fit_all(launch, job.nodes, states))
    return Preparation(ready, others, copied)


def fit_all(
    launch: Launch, nodes: tuple[str, ...], states: Mapping[str, NodeState]
) -> dict[str, tuple[CoreShare, ...]]:
    """Return the nodes' pinning, as it fits their CPUs. A node without a plan gets that of another. Pure."""
    other = next(iter(launch.pinning.values()), ())
    return {
        name: fit_pinning(launch.pinning.get(name, other), states.get(name, NodeState()).cpus)
        for name in nodes
    }
