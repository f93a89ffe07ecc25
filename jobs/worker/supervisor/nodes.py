"""The nodes' state before an attempt: their CPUs, the job's files, and checkpoints.

Every node gets the files it lacks, for example a replacement node.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runtime.checkpoint_names import checkpoint_name, step_of
from ..runtime.cores import CoreShare
from .commands import SlurmJob, ask, succeeds
from .head import SSH
from .launch import (
    CHECKPOINTS,
    LAUNCH,
    MASTER_PORT,
    PORTS,
    SECRETS,
    Launch,
    fit_pinning,
    take_cores,
)
from .transfers import Copies
from .watch import announce

_SEND_S = 1800
_MOST_AT_ONCE = 32
PARTS = f"code data model work site packages {SECRETS} job.json {LAUNCH} run.sh"
"""The parts of a job's folder that a node needs, if they exist."""
PACK = (
    f"tar -cPf - $(ls -d {PARTS} 2>/dev/null) "
    '$(find . -maxdepth 8 -type l -lname "/home/*/spr-[dp]*" ! -lname "*/spr-data/s3/*" '
    '-printf "%l\\n" 2>/dev/null | sort -u)'
)
"""Packs them, and the shared data and packages to which they link; data from S3 are downloaded anew."""
_ASK = """cd {folder} 2>/dev/null && [ -d code/worker ] && echo files
cd {folder}/{checkpoints} 2>/dev/null && ls
python3 -I -S -c 'import os; print("cpus", *sorted(os.sched_getaffinity(0)))'
"""
_TRIES, _PAUSE_S = 3, 5.0


@dataclass(frozen=True)
class NodeState:
    """A responding node's usable CPUs, whether it has the job's files, and its newest checkpoint's step."""

    cpus: tuple[int, ...] = ()
    has_files: bool = False
    newest: int = -1


def ask_nodes(folder: str, names: Collection[str], here: str) -> dict[str, NodeState]:
    """Return the states of the nodes that respond. ``here`` is this node."""
    script = _ASK.format(folder=shlex.quote(folder), checkpoints=CHECKPOINTS)

    def look(name: str) -> NodeState | None:
        # The last line has the CPUs, whatever the folders contain.
        text = ask(["sh", "-c", script] if name == here else [*SSH, name, script])
        return None if text is None else parse_state(text)

    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        found = list(pool.map(look, names))
    return {name: state for name, state in zip(names, found) if state is not None}  # noqa: B905 - 3.8


def parse_state(text: str) -> NodeState:
    """Parse a node's state."""
    lines = text.splitlines()
    cpus = next((line.split()[1:] for line in lines if line.startswith("cpus ")), [])
    newest = max(map(step_of, lines), default=-1)
    return NodeState(tuple(map(int, cpus)), "files" in lines, newest)


def send_files(folder: str, names: Iterable[str]) -> list[str]:
    """Send this node's copy of the job's files to others; return the nodes that failed."""
    quoted = shlex.quote(folder)
    pack = f"cd {quoted} && {PACK}"
    unpack = shlex.quote(f"mkdir -p {quoted} && tar -C {quoted} -xPf -")
    ssh = " ".join(SSH)
    return [
        n for n in names if not _succeeds(f"set -o pipefail; {{ {pack}; }} | {ssh} {n} {unpack}")
    ]


def send_file(
    folder: str, names: Iterable[str], file: str, content: str, *, before: str = "true"
) -> None:
    """Write a file in the job's folder on other nodes, where it exists; one that fails is left out."""
    script = f"cd {shlex.quote(folder)} 2>/dev/null || exit 0; {before}; cat > {file}"

    def send(name: str) -> None:
        succeeds([*SSH, name, script], input=content.encode(), stderr=subprocess.DEVNULL)

    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        list(pool.map(send, names))


def fetch_checkpoint(folder: str, step: int, name: str) -> bool:
    """Fetch a checkpoint from another node; return whether that worked."""
    there = f"{folder}/{CHECKPOINTS}"
    here, step_name = shlex.quote(there), checkpoint_name(step)
    pack = shlex.quote(f"cd {here} && tar -cf - {step_name}")
    new = f"{step_name}.new"
    return _succeeds(
        f"set -e -o pipefail; mkdir -p {here}; cd {here}; rm -rf {new}; mkdir {new}; "
        f"{' '.join(SSH)} {name} {pack} | tar -C {new} -xf -; mv {new}/{step_name} .; rmdir {new}"
    )


def newest_step(folder: str) -> int:
    """Return the step of the newest checkpoint on this node; -1 if there is none."""
    with suppress(OSError):
        return max(map(step_of, Path(folder, CHECKPOINTS).iterdir()), default=-1)
    return -1


def newest_copy(states: Mapping[str, NodeState], here: str) -> str:
    """Return the name of a node with a newer checkpoint than this node; "" if none has. Pure."""
    own = states.get(here, NodeState()).newest
    best = max(states, key=lambda name: states[name].newest, default=here)
    return best if states and states[best].newest > own else ""


def _succeeds(script: str) -> bool:
    return succeeds(["bash", "-c", script], _SEND_S)


def order_nodes(nodes: Iterable[str], here: str, head: str) -> list[str]:
    """Return the nodes for checkpoint copies: the head, then the others in order. Pure."""
    return sorted((name for name in nodes if name != here), key=lambda name: name != head)


def prepare(
    launch: Launch, job: SlurmJob, leaving: Callable[[], Collection[str]]
) -> tuple[Launch, list[Copies]]:
    """Send the job's files and the newest checkpoint to the nodes that lack them.

    Returns the launch for the attempt's nodes, and the copies of its checkpoints, on a node not ``leaving``.
    """
    here = job.nodes[0]
    asked = dict.fromkeys((*job.nodes, *(launch.pinning if launch.resumes else ())))
    for tried in range(_TRIES if launch.resumes and job.attempt > 1 else 1):
        time.sleep(_PAUSE_S if tried else 0)
        states = ask_nodes(launch.folder, asked, here)
        newest = max((state.newest for state in states.values()), default=-1)
        # A silent node may have the only checkpoint.
        if newest >= 0 or len(states) == len(asked):
            break
    lacking = [name for name, state in states.items() if not state.has_files]
    for name in send_files(launch.folder, lacking):
        announce(event="note", text=f"warning: {name} does not take the job's files")
    if launch.resumes and (source := newest_copy(states, here)):
        step = states[source].newest
        what = f"checkpoint {checkpoint_name(step)} from {source}"
        done = any(fetch_checkpoint(launch.folder, step, source) for _ in range(_TRIES))
        announce(event="note", text=what if done else f"warning: {what} can't be fetched")
    others = order_nodes(filter(states.__contains__, launch.pinning), here, launch.head)
    copies = [Copies(launch.folder, others, leaving)] if launch.resumes and others else []
    for each in copies:
        each.kept = states[others[0]].newest
    has_state = job.attempt > 1 or newest >= 0
    # A node without a plan gets another's.
    plan, port = next(iter(launch.pinning.values()), ()), MASTER_PORT
    pinning = {
        name: fit_pinning(launch.pinning.get(name, plan), states.get(name, NodeState()).cpus)
        for name in job.nodes
    }
    if launch.spec.resources.cores:
        parts = job.ask_part()
        pinning, port = take_part(launch, parts)
        # Copies and mpirun use their own job's cores, not a neighbor's.
        os.sched_setaffinity(0, [cpu for _, *cpus in parts[here]["cores"] for cpu in cpus])
    return launch.prepared(again=has_state, pinning=pinning, port=port), copies


def take_part(
    launch: Launch, parts: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, tuple[CoreShare, ...]], int]:
    """Return the pinning on the cores that the queue chose, by node in rank order, and the port. Pure."""
    planned = next(iter(launch.pinning.values()), ())
    pinning = {name: take_cores(planned, part["cores"]) for name, part in parts.items()}
    # No neighbor on the first node has these ports.
    return pinning, MASTER_PORT + PORTS * next(iter(parts.values()))["numbers"][0]
