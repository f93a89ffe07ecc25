"""A job on its nodes, seen from here: started, listened to, ended by Ctrl-C, its failure explained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cluster.nodes import Cluster, HostOpener
from infra.errors import HostError, JobError
from jobs import launch
from jobs.mpirun import LaunchCommand
from jobs.spec import JobPaths
from jobs.squad.events import parse_event
from provision.facts import HostFacts, gather_facts
from provision.host import Host, on_all

Event = dict[str, Any]
_KEPT_LOG_LINES = 200


@dataclass
class Output:
    """What a job says: events for the display, the last log lines, errors."""

    on_event: Callable[[Event], None]
    on_log: Callable[[str], None]
    quiet: bool = False
    """Keep the job's log lines, but hand on neither them nor its command."""
    lines: list[str] = field(default_factory=list)
    errors: list[Event] = field(default_factory=list)

    def take(self, line: str) -> None:
        """One line of the job's output."""
        event = parse_event(line)
        if event is None:
            self.lines = [*self.lines[-_KEPT_LOG_LINES:], line]
            if not self.quiet:
                self.on_log(line)
            return
        if event["event"] == "error":
            self.errors.append(event)
        self.on_event(event)


def require_all_nodes(cluster: Cluster) -> None:
    """mpirun's hostfile names all nodes: with one of them gone it would wait for it in vain."""
    if not cluster.is_whole:
        missing = len(cluster.nodes) != cluster.wanted_nodes
        why = f"{len(cluster.nodes)} of {cluster.wanted_nodes} nodes are running"
        raise JobError(
            f"cluster {cluster.name} is not whole: "
            + (why if missing else "its nodes were not connected yet"),
            hint=f"`spr-cluster repair --name {cluster.name}` replaces and connects them, "
            "`spr-cluster status` shows them",
        )


def ask_facts(cluster: Cluster, open_host: HostOpener) -> dict[str, HostFacts]:
    """What the nodes are now, by their names."""
    hosts = [open_host(node) for node in cluster.nodes]
    hint = f"`spr-cluster repair --name {cluster.name}` replaces nodes that do not answer"
    return on_all("asking the nodes for their facts", hosts, gather_facts, hint=hint)


def private_addresses(cluster: Cluster) -> Mapping[str, str]:
    """The addresses by which the nodes know one another, by their names."""
    return {node.name: node.private_ip for node in cluster.nodes}


def run_command(
    head: Host,
    command: LaunchCommand,
    paths: JobPaths,
    output: Output,
    *,
    grace_s: int = launch.STOP_SECONDS,
) -> int:
    """Run a job to its end and return its exit code.

    Ctrl-C ends it on its nodes, too: it is told to end, and after ``grace_s``, or a second Ctrl-C, it
    is killed.
    """
    for line in (*(f"warning: {text}" for text in command.warnings), f"$ {command}"):
        if not output.quiet:
            output.on_log(line)
    try:
        launch.submit(head, command, paths)
        return launch.follow(head, paths, output.take)
    except KeyboardInterrupt:
        _end(head, paths, output, grace_s)
        raise


def _end(head: Host, paths: JobPaths, output: Output, grace_s: int) -> None:
    head.close()
    try:
        if grace_s > launch.STOP_SECONDS:
            _tell(output, "the job keeps a checkpoint and ends; Ctrl-C again ends it at once")
        try:
            launch.cancel(head, paths, grace_s)
        except KeyboardInterrupt:
            head.close()
            launch.cancel(head, paths, 0)
    except HostError as error:
        gone = head.why_gone()
        if not gone:
            raise JobError(
                f"job {paths.job_id} may still run, and costs: {error.message}",
                hint=f"once the head can be reached: {launch.HOW_TO_END}, or `spr-cluster down`",
            ) from None
        _tell(output, f"the job ended with its head node: {gone}")
        return
    _tell(output, "the job was ended on its nodes")


def _tell(output: Output, line: str) -> None:
    # A terminal that was closed takes no lines any more, and must not save the job from its end.
    with suppress(OSError):
        output.on_log(line)


def explain(exit_code: int, output: Output, hint: str) -> JobError:
    """The first cause: a rank that only lost its peer says so and comes last."""
    causes = sorted(output.errors, key=lambda event: bool(event.get("lost_peer")))
    if causes:
        first = causes[0]
        where = f"rank {first.get('rank')} on {first.get('host')}: "
        own = first.get("hint")
        return JobError(where + str(first["message"]), hint=f"{own}; {hint}" if own else hint)
    known = launch.explain_failure(output.lines)
    last = next((line for line in reversed(output.lines) if line.strip()), "no output")
    return JobError(known or f"the job ended with exit code {exit_code}: {last.strip()}", hint=hint)
