"""The queue on a cluster's head: all jobs, and what removing the cluster would lose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cluster.context import Context
from cluster.nodes import is_unconnected, rank_nodes
from infra.ec2 import tags
from infra.ec2.instances import HEAD
from infra.ec2.inventory import Inventory
from infra.errors import HostError, SprError, UsageError
from infra.wait import start_thread
from infra.words import counted
from provision.host import Host
from provision.on_node import unfetched
from provision.run_on_nodes import send

T = TypeVar("T")


@dataclass(frozen=True)
class NoAnswer:
    """``why`` the head did not answer; "" if no node can have run jobs yet.

    ``is_savable`` if what may be lost could still be saved: on nodes without a head, or on a
    cluster whose key this machine does not have.
    """

    why: str = ""
    is_savable: bool = False


def ask_head(
    ctx: Context, found: Inventory, ask: Callable[[Host], T], limit_s: float
) -> T | NoAnswer:
    """Return the head's answer. Takes at most about ``limit_s`` seconds and never fails."""
    nodes = rank_nodes(found.alive, len(found.alive))
    heads = [node for node in nodes if node.instance.role == HEAD]
    record, damage = None, ""
    try:
        record = found.record
    except SprError as error:
        damage = error.message
    wanted = record.nodes if record else None
    if nodes and not heads and not is_unconnected(found.alive, wanted):
        why = "it is gone; other nodes may have checkpoints, and `repair` makes one the head"
        return NoAnswer(why, is_savable=True)
    # Without connected nodes there can be no jobs.
    if not heads or tags.MESH not in heads[0].instance.tags:
        return NoAnswer()
    if damage or heads[0].instance.state != "running":
        return NoAnswer(damage or f"it is {heads[0].instance.state}")
    jump = record.options["jump"] if record else None
    head = replace(heads[0], jump=jump or "")
    # Nobody could answer a question about this machine's address in time.
    quiet = replace(ctx, allow=lambda _: False)
    try:
        # Connecting alone may take longer.
        return start_thread(lambda: ask(quiet.host_opener()(head))).result(limit_s)
    except FutureTimeoutError:
        return NoAnswer(f"no answer within {limit_s:g} s")
    except SprError as error:
        # Only this machine can't ask: it lacks the key.
        return NoAnswer(error.message, is_savable=isinstance(error, UsageError))


LIST_QUEUE = shlex.join(unfetched.LIST_QUEUE)
_LIST_S = 20
_USABLE = {"idle", "allocated", "mixed", "completing", "planned", "reserved"}
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
# The scripts of all jobs and the marks that they have ended are on every node, except those that were cut
# off meanwhile: the newest file of all nodes counts, and a mark that is older than its script belongs to an
# earlier run in the same folder. Slurm answers some moments after the nodes are connected.
_SUBMIT_AGAIN = r"""# submitting the jobs of the lost head again
mkdir -p ~/spr-jobs/.marks && cd ~/spr-jobs || exit
tail -n +2 ~/hosts 2>/dev/null | xargs -r -P 32 -I@ \
  sh -c 'ssh -n -o ConnectTimeout=10 @ "%MARKS%" >.marks/@ || :'
for archive in .marks/*; do tar --keep-newer-files -xf $archive; done 2>/dev/null
rm -rf .marks
for script in $(ls -tr -- */run.sh 2>/dev/null); do
  job=${script%/run.sh}
  [ ! $job/end.json -nt $script ] && [ ! $job/cancelled -nt $script ] || continue
  grep -qx '#SBATCH --requeue' $script || { echo "left $job"; continue; }
  rm -f $job/end.json $job/cancelled
  [ $job/first.json -nt $script ] || rm -f $job/first.json
  for i in $(seq 60); do found=$(squeue --noheader --name=$job --format=%A) && break; sleep 0.5; done
  [ -n "$found" ] || (cd $job && sbatch --parsable run.sh >/dev/null) && echo "again $job"
done
true
""".replace(
    "%MARKS%",
    "cd ~/spr-jobs && "
    "tar -H posix -cf - */run.sh */launch.json */first.json */end.json */cancelled 2>/dev/null",
)
_SUMMARIZE = f"""# asking how busy the queue is
timeout 2 sinfo --noheader --Node --format='%N|%T|%C' && timeout 2 {LIST_QUEUE}
"""
# A node, its state, and its allocated, idle, other, and all cores.
_NODE_ROW = re.compile(r"^([^|\n]+)\|([^|\n]+)\|(\d+)/\d+/\d+/(\d+)$", re.ASCII | re.MULTILINE)
_NODE_GROUP = re.compile(r"([^,\[]+)(?:\[([^\]]*)\])?")
_NODE_DOWN = "a node that it requires is down; `spr-cluster repair` restarts or replaces it"
# Slurm's reasons in plain words:
# https://slurm.schedmd.com/squeue.html#SECTION_JOB-REASON-CODES
_REASONS = {
    "None": "it starts in some moments",
    "Resources": "its nodes are in use",
    "Priority": "other jobs are first",
    "JobHeldUser": "its submission is not complete; if that takes minutes, cancel it",
    "BeginTime": "it starts again in some seconds",
    "ReqNodeNotAvail": _NODE_DOWN,
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": (
        _NODE_DOWN
    ),
    "PartitionNodeLimit": "it requires more nodes than the cluster has",
    "PartitionConfig": "it requires more nodes than the cluster has",
}
# A drained node and the reason; the health check's reasons begin with the kind of problem.
_DRAINED = re.compile(r"(node\d+) (?:(spot|disk): )?(.+)")
_REMEDIES = {
    "spot": "`spr-cluster repair` replaces it",
    "disk": "free space there, and it returns to the queue by itself",
    None: "it is out of the queue",
}


@dataclass(frozen=True)
class QueuedJob:
    """A running or waiting job. ``name`` is our job ID, or the user's name for it.

    ``state`` is Slurm's. ``nodes`` is empty while the job waits for the given reason.
    """

    id: str
    state: str
    nodes: tuple[str, ...]
    reason: str
    name: str

    @property
    def is_waiting(self) -> bool:
        return self.state == unfetched.PENDING


@dataclass(frozen=True)
class QueueSummary:
    """Numbers of nodes that Slurm knows and can use, and of running and waiting jobs.

    ``unusable`` are the other nodes, each with Slurm's word.
    """

    nodes: int
    usable_nodes: int
    running: int
    waiting: int
    unusable: Mapping[str, str] = field(default_factory=dict)
    cores_in_use: int = 0
    cores: int = 0

    def __str__(self) -> str:
        why = ", ".join(f"{node} is {state}" for node, state in self.unusable.items())
        nodes = f"{self.usable_nodes} of {counted(self.nodes, 'node')}{f' ({why})' if why else ''}"
        some = 0 < self.cores_in_use < self.cores
        used = f" on {self.cores_in_use} of {counted(self.cores, 'core')}" if some else ""
        return f"{nodes}, {counted(self.running, 'job')} running{used}, {self.waiting} waiting"


def summarize_queue(head: Host) -> QueueSummary:
    """Summarize a cluster's queue. Raises :class:`HostError`."""
    said = _ask_slurm(head, _SUMMARIZE, 2)
    rows = _NODE_ROW.findall(said)
    states = {name: state for name, state, _, _ in rows}
    cores = sum(int(row[2]) for row in rows), sum(int(row[3]) for row in rows)
    waiting = [job.is_waiting for job in parse_queue(said)]
    # Slurm marks states: "down*" does not answer, "idle~" saves power.
    bad = {name: s.rstrip("*~#!%$@^-+") for name, s in states.items() if not is_usable(s)}
    usable = len(states) - len(bad)
    return QueueSummary(len(states), usable, waiting.count(False), waiting.count(True), bad, *cores)


def is_usable(state: str) -> bool:
    """Return whether a node in a state can run jobs. Slurm adds ``+`` while another job there is ending,
    and ``-`` while it plans another: https://slurm.schedmd.com/sinfo.html#SECTION_NODE-STATE-CODES
    """
    return state.rstrip("+-") in _USABLE


def list_queue(head: Host) -> tuple[QueuedJob, ...]:
    """Return the cluster's queue in the order of submission. Raises :class:`HostError`."""
    return parse_queue(_ask_slurm(head, f"timeout {_LIST_S} {LIST_QUEUE}", _LIST_S))


def _ask_slurm(head: Host, command: str, limit_s: int) -> str:
    # Startup files may have printed a terminal's title, without a newline.
    done = head.run(f"echo; {command}", check=False)
    if done.exit_code:
        last = (done.stderr.strip() or f"no answer within {limit_s} s").splitlines()[-1]
        hint = "`verify` shows how to start it again"
        raise HostError(head.name, f"Slurm does not answer: {last}", hint=hint)
    return done.stdout


def submit_again(head: Host) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Submit the jobs that ended with the head before this one, oldest first.

    Returns their names, and those of jobs that must not run twice.
    """
    lines = [line.split() for line in head.run(_SUBMIT_AGAIN, timeout_s=120).stdout.splitlines()]
    found = [(line[0], line[1]) for line in lines if len(line) == 2]
    again, left = (tuple(job for word, job in found if word == kind) for kind in ("again", "left"))
    return again, left


def parse_queue(text: str) -> tuple[QueuedJob, ...]:
    """Return the jobs in the output of :data:`LIST_QUEUE`."""
    jobs = (
        QueuedJob(id_, state, tuple(expand_nodes(nodes)), reason, name)
        for id_, state, nodes, reason, name in unfetched.split_queue(text)
        if id_.isdecimal()
    )
    return tuple(sorted(jobs, key=lambda job: int(job.id)))


def expand_nodes(text: str) -> Iterator[str]:
    """Yield the names in Slurm's short form, such as ``node[0-2,7]``."""
    for stem, ranges in _NODE_GROUP.findall(text):
        if not ranges:
            yield stem
        for first, last in _RANGE.findall(ranges):
            for number in range(int(first), int(last or first) + 1):
                yield f"{stem}{number:0{len(first)}}"


def describe_reason(reason: str) -> str:
    """Explain Slurm's reason why a job waits."""
    if drained := _DRAINED.match(reason):
        node, kind, text = drained.groups()
        return f"{node}: {text}; {_REMEDIES[kind]}"
    return _REASONS.get(reason, reason)


def find_running_job(head: Host) -> str | None:
    """Return the name of the oldest job that is running; ``None`` if no node is in use."""
    return next((job.name for job in list_queue(head) if not job.is_waiting), None)


def how_to_end(job: str, flags: str) -> str:
    """Return the command that ends a job of the cluster that ``flags`` name."""
    return f"spr-cluster cancel {job} {flags}".rstrip()


_DEADLINE_S = 10.0
ACTIVE = ("running", "waiting")
_KEPT = ("checkpoint", "model", "results")


@dataclass(frozen=True)
class Losses:
    """Pairs of what would be lost and the job's ID; ``unknown`` is why the head did not answer."""

    found: tuple[tuple[str, str], ...] = ()
    unknown: str = ""
    is_savable: bool = False

    def describe(self, flags: str) -> Iterator[str]:
        """Return the lines for a user; ``flags`` name the cluster in a command."""
        if self.unknown:
            yield f"The head could not be asked what would be lost: {self.unknown}"
        yield from (f"Job {job} is {what}." for what, job in self.found if what in ACTIVE)
        if kept := [f"the {what} of {job}" for what, job in self.found if what not in ACTIVE]:
            how = f"To keep results: spr-cluster fetch JOB {flags}"
            yield f"Only on the nodes: {', '.join(kept)}. {how}"


def find_losses(ctx: Context, found: Inventory) -> Losses:
    """Query the head for what removing the cluster would lose. Takes seconds and never fails."""
    answer = ask_head(ctx, found, _ask, _DEADLINE_S)
    if isinstance(answer, NoAnswer):
        return Losses(unknown=answer.why, is_savable=answer.is_savable)
    return answer


def list_losses() -> str:
    """Return the shell command of :mod:`provision.on_node.unfetched`."""
    return send(unfetched).render("listing what would be lost")


def _ask(head: Host) -> Losses:
    lines = head.run(list_losses(), timeout_s=_DEADLINE_S).stdout.splitlines()
    pairs = [line.partition(" ")[::2] for line in lines]
    # The shell's startup files may print other lines.
    found = tuple(pair for pair in pairs if pair[0] in (*ACTIVE, *_KEPT))
    why = next((f"its queue does not answer: {why}" for what, why in pairs if what == "queue"), "")
    return Losses(found, why)
