"""The nodes' state before and during an attempt: their CPUs, the job's files, and checkpoints.

Before an attempt, every node gets the files it lacks, for example a replacement node. During it, each
checkpoint is copied to a second node, so that losing one node loses no checkpoint.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runtime.cores import CoreShare
from .commands import LOW_PRIORITY, SlurmJob, ask, succeeds
from .head import SSH
from .launch import CHECKPOINTS, END, SECRETS, Launch, fit_pinning
from .watch import announce

_SEND_S = 1800
_MOST_AT_ONCE = 32
_STEP = re.compile(r"step-(\d{6,})")
PARTS = f"code data model work site packages {SECRETS} job.json run.sh"
"""The parts of a job's folder that a node needs, if they exist."""
PACK = (
    f"tar -cPf - $(ls -d {PARTS} 2>/dev/null) "
    '$(find . -maxdepth 8 -type l -lname "/home/*/spr-[dp]*" ! -lname "*/spr-data/s3/*" '
    '-printf "%l\\n" 2>/dev/null | sort -u)'
)
"""Packs them, and the shared data and packages to which they link; data from S3 are downloaded anew."""
_ASK = """cd {folder} 2>/dev/null && [ -d code/worker ] && echo files
cd {folder}/{checkpoints} 2>/dev/null && ls
sed -n 's/^Cpus_allowed_list:/cpus/p' /proc/self/status
"""
_LOOK_S, _AGAIN_S, _COPY_S = 1.0, 15.0, 900
_TRIES, _PAUSE_S = 3, 5.0
_KEPT = 2
# A complete checkpoint is renamed to its final name; then older copies are removed.
_TAKE = """set -e
mkdir -p {folder}; cd {folder}
rm -rf *.copy; mkdir {name}.copy; ({low} tar -C {name}.copy -xf -)
[ -s {name}.copy/checkpoint.json ]
[ -s {name}.copy/state.pt ]
rm -rf {name}; mv {name}.copy {name}
ls | grep -x 'step-[0-9]*' | sort -V | head -n -{kept} | xargs -r rm -rf
"""


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
    steps = [int(found[1]) for line in lines if (found := _STEP.fullmatch(line))]
    cpus = next((line.split()[1] for line in lines if line.startswith("cpus")), "")
    return NodeState(parse_cpus(cpus), "files" in lines, max(steps, default=-1))


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the CPUs in the kernel's list format, such as ``0-3,8``."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def send_files(folder: str, names: Iterable[str]) -> list[str]:
    """Send this node's copy of the job's files to others; return the nodes that failed."""
    quoted = shlex.quote(folder)
    pack = f"cd {quoted} && {PACK}"
    unpack = shlex.quote(f"mkdir -p {quoted} && tar -C {quoted} -xPf -")
    ssh = " ".join(SSH)
    return [
        n for n in names if not _succeeds(f"set -o pipefail; {{ {pack}; }} | {ssh} {n} {unpack}")
    ]


def send_end(folder: str, names: Iterable[str], content: str) -> None:
    """Record a job's end on other nodes, so that a new head does not restart it; delete its secrets."""
    script = f"cd {shlex.quote(folder)} 2>/dev/null || exit 0; rm -f {SECRETS}; cat > {END}"

    def send(name: str) -> None:
        succeeds([*SSH, name, script], input=content.encode(), stderr=subprocess.DEVNULL)

    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        list(pool.map(send, names))


def fetch_checkpoint(folder: str, step: int, name: str) -> bool:
    """Fetch a checkpoint from another node; return whether that worked."""
    there = f"{folder}/{CHECKPOINTS}"
    here, step_name = shlex.quote(there), f"step-{step:06d}"
    pack = shlex.quote(f"cd {here} && tar -cf - {step_name}")
    new = f"{step_name}.new"
    return _succeeds(
        f"set -e -o pipefail; mkdir -p {here}; cd {here}; rm -rf {new}; mkdir {new}; "
        f"{' '.join(SSH)} {name} {pack} | tar -C {new} -xf -; mv {new}/{step_name} .; rmdir {new}"
    )


def newest_step(folder: str) -> int:
    """Return the step of the newest checkpoint on this node; -1 if there is none."""
    with suppress(OSError):
        names = [path.name for path in Path(folder, CHECKPOINTS).iterdir()]
        return parse_state("\n".join(names)).newest
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
) -> tuple[Launch, CheckpointCopier]:
    """Send the job's files and the newest checkpoint to the nodes that lack them.

    Returns the launch for the attempt's nodes, and the copier of its checkpoints to nodes not ``leaving``.
    """
    here = job.nodes[0]
    asked = dict.fromkeys((*job.nodes, *(launch.pinning if launch.again else ())))
    for tried in range(_TRIES if launch.again and job.attempt > 1 else 1):
        time.sleep(_PAUSE_S if tried else 0)
        states = ask_nodes(launch.folder, asked, here)
        newest = max((state.newest for state in states.values()), default=-1)
        # A silent node may have the only checkpoint.
        if newest >= 0 or len(states) == len(asked):
            break
    lacking = [name for name, state in states.items() if not state.has_files]
    for name in send_files(launch.folder, lacking):
        announce(event="note", text=f"warning: {name} does not take the job's files")
    if launch.again and (source := newest_copy(states, here)):
        step = states[source].newest
        what = f"checkpoint step-{step:06d} from {source}"
        done = any(fetch_checkpoint(launch.folder, step, source) for _ in range(_TRIES))
        announce(event="note", text=what if done else f"warning: {what} can't be fetched")
    others = order_nodes(filter(states.__contains__, launch.pinning), here, launch.head)
    copied = states[others[0]].newest if others else -1
    has_state = job.attempt > 1 or newest >= 0
    ready = launch.prepared(again=has_state, pinning=fit_all(launch, job.nodes, states))
    return ready, CheckpointCopier(launch.folder, others, leaving, copied)


def fit_all(
    launch: Launch, nodes: tuple[str, ...], states: Mapping[str, NodeState]
) -> dict[str, tuple[CoreShare, ...]]:
    """Return the nodes' pinning, adapted to their CPUs. A node without a plan gets another's. Pure."""
    other = next(iter(launch.pinning.values()), ())
    return {
        name: fit_pinning(launch.pinning.get(name, other), states.get(name, NodeState()).cpus)
        for name in nodes
    }


@dataclass
class CheckpointCopier:
    """Copies each new checkpoint to another node, one at a time, with low priority."""

    folder: str
    to: list[str]
    """Candidate nodes; the first is in use. If it fails, it moves to the end."""
    leaving: Callable[[], Collection[str]] = tuple
    """Returns the nodes that can't keep a copy, such as those being reclaimed by EC2."""
    newest: int = -1
    """The step of the newest copied checkpoint."""
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _warned: bool = False

    def start(self) -> None:
        """Start to copy new checkpoints."""
        if self.to:
            self._thread = threading.Thread(target=self._copy_all, daemon=True)
            self._thread.start()

    def finish(self, limit_s: float) -> None:
        """Wait at most so long until the newest checkpoint is copied."""
        self._ended.set()
        if self._thread:
            self._thread.join(limit_s)

    def _copy_all(self) -> None:
        last, pause = False, _LOOK_S
        while not last:
            last, pause = self._ended.wait(pause), _LOOK_S
            self._prefer_staying()
            step = newest_step(self.folder)
            if step <= self.newest:
                continue
            if self._copy(f"step-{step:06d}"):
                self.newest = step
            else:
                self.to.append(self.to.pop(0))
                pause = _AGAIN_S

    def _prefer_staying(self) -> None:
        """Copy to a leaving node only if there is no other."""
        gone, first = self.leaving(), self.to[0]
        self.to.sort(key=gone.__contains__)
        if self.to[0] != first:
            self.newest = -1

    def _copy(self, name: str) -> bool:
        folder = f"{self.folder}/{CHECKPOINTS}"
        take = _TAKE.format(folder=shlex.quote(folder), name=name, kept=_KEPT, low=LOW_PRIORITY)
        pack, send = (
            ["sh", "-c", f"{LOW_PRIORITY} {shlex.join(argv)}"]
            for argv in (
                ["tar", "-C", f"{folder}/{name}", "-cf", "-", "."],
                [*SSH, self.to[0], take],
            )
        )
        options: dict[str, Any] = {"stderr": subprocess.DEVNULL, "start_new_session": True}
        with subprocess.Popen(pack, stdout=subprocess.PIPE, **options) as source:
            if succeeds(send, _COPY_S, stdin=source.stdout, **options):
                return True
            source.kill()
        # If it was removed meanwhile, a newer one exists.
        if Path(folder, name).exists() and not self._warned:
            self._warned = True
            text = f"warning: no second copy of checkpoint {name}: {self.to[0]} does not take it"
            announce(event="note", text=text)
        return False
