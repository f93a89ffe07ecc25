"""What the nodes have of a job: its files, their CPUs, and checkpoints.

Before an attempt, every node gets what it lacks, such as one that `repair` has replaced. During it, another
node gets a second copy of each checkpoint: no single node's loss may take all of them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..runtime.cores import CoreShare
from .commands import SlurmJob, ask, succeeds
from .head import SSH
from .launch import CHECKPOINTS, END, SECRETS, Launch, fit_pinning
from .watch import announce

_SEND_S = 1800
_MOST_AT_ONCE = 32
_STEP = re.compile(r"step-(\d{6,})")
PARTS = f"code data model work {SECRETS} job.json run.sh output/.keep"
"""What a node needs of a job's folder; not every job has all of it."""
_ASK = """cd {folder} 2>/dev/null && [ -d code/worker ] && echo files
cd {folder}/{checkpoints} 2>/dev/null && ls
sed -n 's/^Cpus_allowed_list:/cpus/p' /proc/self/status
"""
_LOOK_S, _AGAIN_S, _COPY_S, _LAST_S = 1.0, 15.0, 900, 60
_KEPT = 2
# The checkpoint gets its name when it is complete; then older copies are removed.
_TAKE = """set -e
mkdir -p {folder}; cd {folder}
rm -rf {name}.copy; mkdir {name}.copy; nice tar -C {name}.copy -xf -
[ -s {name}.copy/checkpoint.json ] && [ -s {name}.copy/state.pt ]
rm -rf {name}; mv {name}.copy {name}
ls | grep -x 'step-[0-9]*' | sort -V | head -n -{kept} | xargs -r rm -rf
"""


@dataclass(frozen=True)
class NodeState:
    """What a node that answers has: CPUs for processes, the job's files, and the newest checkpoint's step."""

    cpus: tuple[int, ...] = ()
    has_files: bool = False
    newest: int = -1


def ask_nodes(folder: str, names: Iterable[str], here: str) -> dict[str, NodeState]:
    """Return the states of the nodes that answer. ``here`` is this node."""
    script = _ASK.format(folder=shlex.quote(folder), checkpoints=CHECKPOINTS)

    def look(name: str) -> NodeState | None:
        # The last line is that of the CPUs, for any content of the folders.
        text = ask(["sh", "-c", script] if name == here else [*SSH, name, script])
        return None if text is None else parse_state(text)

    asked = list(dict.fromkeys(names))
    with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        found = list(pool.map(look, asked))
    return {name: state for name, state in zip(asked, found) if state is not None}  # noqa: B905 - 3.8


def parse_state(text: str) -> NodeState:
    """Return what a node printed about itself."""
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
    """Send this node's copy of the job's files to others; return those that did not get them."""
    quoted = shlex.quote(folder)
    pack = f"cd {quoted} && tar -cf - $(ls -d {PARTS} 2>/dev/null)"
    unpack = shlex.quote(f"mkdir -p {quoted} && tar -C {quoted} -xf -")
    ssh = " ".join(SSH)
    return [
        n for n in names if not _succeeds(f"set -o pipefail; {{ {pack}; }} | {ssh} {n} {unpack}")
    ]


def send_end(folder: str, names: Iterable[str], content: str) -> None:
    """Write a job's end on other nodes: a new head must not start it again, and nobody needs its secrets."""
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


def newest_copy(states: Mapping[str, NodeState], here: str) -> str:
    """Return the name of a node that has a newer checkpoint than this one; "" if none has. Pure."""
    own = states.get(here, NodeState()).newest
    best = max(states, key=lambda name: states[name].newest, default=here)
    return best if states and states[best].newest > own else ""


def _succeeds(script: str) -> bool:
    return succeeds(["bash", "-c", script], _SEND_S)


def order_nodes(nodes: Iterable[str], here: str, head: str) -> list[str]:
    """Return which of the nodes may have copies: the head, then the other ones in their order. Pure."""
    return sorted((name for name in nodes if name != here), key=lambda name: name != head)


def prepare(
    launch: Launch, job: SlurmJob, leaving: Callable[[], Collection[str]]
) -> tuple[Launch, CheckpointCopier]:
    """Send the job's files and the newest checkpoint to where they are missing.

    Return the launch that fits the attempt's nodes, and what copies its checkpoints to nodes not ``leaving``.
    """
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
    return ready, CheckpointCopier(launch.folder, others, leaving, copied)


def fit_all(
    launch: Launch, nodes: tuple[str, ...], states: Mapping[str, NodeState]
) -> dict[str, tuple[CoreShare, ...]]:
    """Return the nodes' pinning, as it fits their CPUs. A node without a plan gets that of another. Pure."""
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
    """The nodes that may have them. The first one has; if it fails, it becomes the last one."""
    leaving: Callable[[], Collection[str]] = tuple
    """Returns the nodes that can't keep a copy, such as those that EC2 takes back."""
    newest: int = -1
    """The step of the newest checkpoint that is there."""
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _warned: bool = False

    def start(self) -> None:
        """Copy what comes from now on."""
        if self.to:
            self._thread = threading.Thread(target=self._copy_all, daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait until the newest one is copied, for a limited time."""
        self._ended.set()
        if self._thread:
            self._thread.join(_LAST_S)

    def _copy_all(self) -> None:
        last, pause = False, _LOOK_S
        while not last:
            last, pause = self._ended.wait(pause), _LOOK_S
            self._prefer_staying()
            step = self._find_newest()
            if step <= self.newest:
                continue
            if self._copy(f"step-{step:06d}"):
                self.newest = step
            else:
                self.to.append(self.to.pop(0))
                pause = _AGAIN_S

    def _prefer_staying(self) -> None:
        """Copy to a node that is leaving only if there is no other."""
        gone, first = self.leaving(), self.to[0]
        self.to.sort(key=gone.__contains__)
        if self.to[0] != first:
            self.newest = -1

    def _find_newest(self) -> int:
        with suppress(OSError):
            names = [path.name for path in Path(self.folder, CHECKPOINTS).iterdir()]
            return parse_state("\n".join(names)).newest
        return -1

    def _copy(self, name: str) -> bool:
        folder = f"{self.folder}/{CHECKPOINTS}"
        take = _TAKE.format(folder=shlex.quote(folder), name=name, kept=_KEPT)
        pack = ["nice", "-n", "19", "tar", "-C", f"{folder}/{name}", "-cf", "-", "."]
        argv = ["nice", "-n", "19", *SSH, self.to[0], take]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(pack, stdout=subprocess.PIPE, stderr=quiet) as source:
            if succeeds(argv, _COPY_S, stdin=source.stdout, stderr=quiet):
                return True
            source.kill()
        # One that was removed meanwhile has a newer one after it.
        if Path(folder, name).exists() and not self._warned:
            self._warned = True
            text = f"warning: no second copy of checkpoint {name}: {self.to[0]} does not take it"
            announce(event="note", text=text)
        return False
