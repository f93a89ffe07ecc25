"""Following a running job: its output, its silence, Ctrl-C, and the cause of a failure."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from cluster.running_job import how_to_end
from infra.errors import HangupError, HostError, JobError
from jobs.launch.launcher import Launcher
from jobs.launch.mpirun import LaunchCommand
from jobs.launch.plan import STOP_SECONDS, JobPaths
from jobs.worker.runtime.events import parse_event
from provision.mpi import explain_mpi_failure

Event = dict[str, Any]
_KEPT_LOG_LINES = 200
# One of each is kept for the caller; steps come by the thousand.
_NOT_KEPT = {"step", "phase"}
# Hydra's words when the SSH connection to a node breaks.
_LOST_NODE = re.compile(r"Downstream from host (node(\d+)) exited abnormally")


@dataclass
class JobOutput:
    """A job's output: events for the display, the last log lines, and errors."""

    on_event: Callable[[Event], None]
    on_log: Callable[[str], None]
    quiet: bool = False
    """Keep the job's log lines without showing them or its command."""
    lines: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)
    """When the job printed its last line."""

    def add_line(self, line: str) -> None:
        """Add one line of the job's output."""
        self.heard = time.monotonic()
        event = parse_event(line)
        if event is None:
            self.lines = [*self.lines[-_KEPT_LOG_LINES:], line]
            if not self.quiet:
                self.show(line)
            return
        if event["event"] not in _NOT_KEPT:
            self.events.append(event)
        # The job matters more than its display, whose terminal may be gone.
        with suppress(OSError):
            self.on_event(event)

    def show(self, line: str) -> None:
        """Show a line, such as one about the job, if there is anyone to see it."""
        with suppress(OSError):
            self.on_log(line)

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

    Ctrl-C stops it on all nodes; after ``grace_s`` seconds, or a second Ctrl-C, it is killed. If the
    terminal is closed, it goes on.
    """
    for line in (*(f"warning: {text}" for text in command.warnings), f"$ {command}"):
        if not output.quiet:
            output.show(line)
    state = "may have started"
    try:
        launcher.start(command, paths)
        state = "keeps running"
        with note_silence(output):
            return launcher.follow(paths, output.add_line)
    except HangupError:
        job, flags = paths.job_id, launcher.flags
        output.show(
            f"job {job} {state}; `spr-cluster jobs {flags}` shows its state, "
            f"`spr-cluster fetch {job} {flags}` downloads its results"
        )
        raise
    except KeyboardInterrupt:
        _stop(launcher, paths, output, grace_s)
        raise


@contextmanager
def note_silence(output: JobOutput, minute_s: float = 60) -> Iterator[None]:
    """Show for how long a job has printed nothing: after 1, 2, 4, 8, … minutes."""
    ended = threading.Event()

    def watch() -> None:
        minutes = 1
        while not ended.wait(minute_s / 12):
            silent = (time.monotonic() - output.heard) / minute_s
            if silent < 1:
                minutes = 1
            elif silent >= minutes:
                output.show(f"no output for {minutes} min")
                minutes *= 2

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def stop_job(
    launcher: Launcher, paths: JobPaths, grace_s: int, on_log: Callable[[str], None]
) -> tuple[str, ...]:
    """End a job on all nodes, at the latest after ``grace_s`` seconds; Ctrl-C ends it at once.

    Returns the names of nodes that can't be reached, which the log names, too.
    """
    if grace_s > STOP_SECONDS:
        on_log("saving a checkpoint and stopping; press Ctrl-C again to stop immediately")
    try:
        silent = launcher.cancel(paths, grace_s)
    except HangupError:
        raise  # the head goes on with it
    except KeyboardInterrupt:
        launcher.disconnect()
        silent = launcher.cancel(paths, 0)
    if silent:
        on_log(
            f"{', '.join(silent)} can't be reached, and ranks may still be running there: "
            f"`spr-cluster repair {launcher.flags}` replaces nodes that don't answer"
        )
    return silent


def _stop(launcher: Launcher, paths: JobPaths, output: JobOutput, grace_s: int) -> None:
    launcher.disconnect()
    try:
        silent = stop_job(launcher, paths, grace_s, output.show)
    except HostError as error:
        gone = launcher.why_gone()
        if not gone:
            raise JobError(
                f"job {paths.job_id} may still be running and costing money: {error.message}",
                hint=f"once the head is reachable: {how_to_end(launcher.flags)}, or "
                f"`spr-cluster down {launcher.flags}`",
            ) from None
        output.show(f"the job ended with its head node: {gone}")
        return
    output.show(f"Job stopped on all nodes{' that can be reached' if silent else ''}")


def explain(exit_code: int, output: JobOutput, hint: str) -> JobError:
    """Return the root cause of a failure: errors of ranks that only lost a peer come last."""
    causes = sorted(output.errors, key=lambda event: bool(event.get("lost_peer")))
    if causes:
        first = causes[0]
        where = f"rank {first.get('rank')} on {first.get('host')}: "
        own = first.get("hint")
        return JobError(where + str(first["message"]), hint=f"{own}; {hint}" if own else hint)
    known = explain_mpi_failure(output.lines) or _describe_lost_node(output)
    last = next((line for line in reversed(output.lines) if line.strip()), "no output")
    return JobError(known or f"the job ended with exit code {exit_code}: {last.strip()}", hint=hint)


def _describe_lost_node(output: JobOutput) -> str | None:
    """Return which ranks and host are lost, if mpirun noticed that before the ranks did."""
    lost = next((match for line in output.lines if (match := _LOST_NODE.search(line))), None)
    if lost is None:
        return None
    name, number = lost[1], int(lost[2])
    start = next((event for event in output.events if event["event"] == "start"), None)
    if start is None or number >= len(start["hosts"]):
        return f"lost contact with {name}: its node is down or cut off"
    each = start["world_size"] // len(start["hosts"])
    first, last = number * each, (number + 1) * each - 1
    ranks = f"rank {first}" if each == 1 else f"ranks {first} to {last}"
    host = start["hosts"][number]
    return f"lost contact with {ranks} on {host} ({name}): its node is down or cut off"
