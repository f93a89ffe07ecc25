"""Following a running job: its output, Ctrl-C, and the cause of a failure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cluster.running_job import HOW_TO_END
from infra.errors import HostError, JobError
from jobs.launch.launcher import Launcher
from jobs.launch.mpirun import LaunchCommand
from jobs.launch.plan import STOP_SECONDS, JobPaths
from jobs.worker.runtime.events import parse_event
from provision.mpi import explain_mpi_failure

Event = dict[str, Any]
_KEPT_LOG_LINES = 200
# One of each is kept for the caller; steps come by the thousand.
_NOT_KEPT = {"step", "phase"}


@dataclass
class JobOutput:
    """A job's output: events for the display, the last log lines, and errors."""

    on_event: Callable[[Event], None]
    on_log: Callable[[str], None]
    quiet: bool = False
    """Keep the job's log lines without showing them or its command."""
    lines: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def add_line(self, line: str) -> None:
        """Add one line of the job's output."""
        event = parse_event(line)
        if event is None:
            self.lines = [*self.lines[-_KEPT_LOG_LINES:], line]
            if not self.quiet:
                self.on_log(line)
            return
        if event["event"] not in _NOT_KEPT:
            self.events.append(event)
        self.on_event(event)

    @property
    def errors(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "error"]

    def first_exit_code(self, default: int) -> int:
        """Return the exit code of the rank that failed first; mpirun's own differs on several nodes."""
        return int(next((e["exit_code"] for e in self.errors if "exit_code" in e), default))


def run_command(
    launcher: Launcher, command: LaunchCommand, paths: JobPaths, output: JobOutput, grace_s: int
) -> int:
    """Run a job to its end and return its exit code.

    Ctrl-C stops it on all nodes; after ``grace_s`` seconds, or a second Ctrl-C, it is killed.
    """
    for line in (*(f"warning: {text}" for text in command.warnings), f"$ {command}"):
        if not output.quiet:
            output.on_log(line)
    try:
        launcher.start(command, paths)
        return launcher.follow(paths, output.add_line)
    except KeyboardInterrupt:
        _stop(launcher, paths, output, grace_s)
        raise


def _stop(launcher: Launcher, paths: JobPaths, output: JobOutput, grace_s: int) -> None:
    launcher.disconnect()
    try:
        if grace_s > STOP_SECONDS:
            _log(output, "saving a checkpoint and stopping; press Ctrl-C again to stop immediately")
        try:
            launcher.cancel(paths, grace_s)
        except KeyboardInterrupt:
            launcher.disconnect()
            launcher.cancel(paths, 0)
    except HostError as error:
        gone = launcher.why_gone()
        if not gone:
            raise JobError(
                f"job {paths.job_id} may still be running and costing money: {error.message}",
                hint=f"once the head is reachable: {HOW_TO_END}, or `spr-cluster down`",
            ) from None
        _log(output, f"the job ended with its head node: {gone}")
        return
    _log(output, "Job stopped on all nodes")


def _log(output: JobOutput, line: str) -> None:
    # The job must be stopped even if the terminal is closed.
    with suppress(OSError):
        output.on_log(line)


def explain(exit_code: int, output: JobOutput, hint: str) -> JobError:
    """Return the root cause of a failure: errors of ranks that only lost a peer come last."""
    causes = sorted(output.errors, key=lambda event: bool(event.get("lost_peer")))
    if causes:
        first = causes[0]
        where = f"rank {first.get('rank')} on {first.get('host')}: "
        own = first.get("hint")
        return JobError(where + str(first["message"]), hint=f"{own}; {hint}" if own else hint)
    known = explain_mpi_failure(output.lines)
    last = next((line for line in reversed(output.lines) if line.strip()), "no output")
    return JobError(known or f"the job ended with exit code {exit_code}: {last.strip()}", hint=hint)
